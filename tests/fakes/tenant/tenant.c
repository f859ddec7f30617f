/*
 * A process with a GPU, as HAMi sees it: takes a slot in the shared cache file, guesses its host PID, runs the
 * watcher, and works with the load it is told to.
 *
 *   tenant --cache PATH --uuid UUID [--uuid UUID ...] [--layout v1.2] [--sm-limit N] [--memory BYTES]
 *          [--memory-limit BYTES] [--priority N] [--driver-socket PATH] [--use UUID ...] [--load N]
 *          [--guess list|none|self|wrong|NUMBER] [--broker-socket PATH] [--lock-timeout-ms N] [--lock-tries N] [--mover N [--slots N] [--ends]]
 *          [--zeroes first|all] [--fills set|add|nothing] [--keep-monitorused] [--cached-slot] [--removes-itself]
 *          [--clears-moved] [--second-call] [--cuda-order N[,N...] [--asks-cuda-number]]
 *          [--init-waits]
 *
 * The options from --zeroes on are what releases do differently; tests/fakes/releases.py has them all. As upstream, it takes
 * its slot first, starts CUDA and makes its contexts then, and guesses its host PID last. With `--init-waits` it prints
 * an event `slot`, and CUDA is started by the line `init` on standard input.
 *
 * With LIBVGPU_HOSTPID_BROKER=1 it asks the node's broker first, and guesses only if that tells nothing.
 * `--use` names the devices this process makes a context on (default: all of the region's). Prints one JSON line
 * when ready, then answers each line on standard input with one: load N (of every device, or `load N M ...` of each), memory N,
 * hostpid N, busy (of CUDA's kernels), slot, slots, fork, lock, unlock, compact, quit. SIGTERM and the end of standard input are a clean exit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "broker.h"
#include "cuda.h"
#include "driver.h"
#include "mover.h"
#include "region.h"
#include "watcher.h"

static struct {
    const char *cache, *layout, *driver_socket, *guess, *broker_socket;
    const char *uuids[REGION_DEVICES], *used[REGION_DEVICES];
    int order[REGION_DEVICES], visible;
    int uuid_num, used_num, load, slots, priority, lock_timeout_ms, lock_tries, init_waits, cached_slot, ends;
    long moves;
    uint64_t sm_limit, memory, memory_limit;
} option = {.layout = "v1.2", .guess = "list", .broker_socket = "/tmp/vgpulock/hostpid/broker.sock", .slots = 8, .lock_timeout_ms = 10000, .lock_tries = 30,
            .memory = 512u << 20, .memory_limit = 8ull << 30};

static struct region region;
static struct region_setup setup;
static struct gpu_use use;
static struct watcher_ways ways;
static int slot_at_start; /* its index then: what a process that caches its slot's address goes on using */

static void print_event(const char *event, int ns_pid);

/* ---- starting --------------------------------------------------------------------------------------------------- */

static int forced_hostpid(void)
{
    if (strcmp(option.guess, "self") == 0)
        return getpid();
    if (strcmp(option.guess, "wrong") == 0)
        return 999999; /* above the default pid_max: nobody's */
    return atoi(option.guess);
}

static void set_own_hostpid(int hostpid)
{
    if (region_lock(&region) < 0)
        exit(3);
    int own = slot_own(&region, getpid());
    if (own >= 0) {
        slot_write_begin(&region, own);
        __atomic_store_n(slot_hostpid(&region, own), hostpid, __ATOMIC_SEQ_CST);
        slot_write_end(&region, own);
    }
    region_unlock(&region);
}

static void account_memory(void)
{
    int own = option.cached_slot ? slot_at_start : slot_own(&region, getpid());
    if (own < 0)
        return;
    slot_write_begin(&region, own);
    for (int d = 0; d < option.uuid_num; d++)
        for (int u = 0; u < use.used_num; u++)
            if (strcmp(option.uuids[d], use.used[u]) == 0) {
                long at = slot_at(&region, own) + region.layout->used + d * region.layout->used_size;
                *u64_at(&region, at + USED_CONTEXT) = option.memory;
                *u64_at(&region, at + USED_TOTAL) = option.memory;
            }
    slot_write_end(&region, own);
}

static int set_load(int sm)
{
    option.load = sm;
    for (int u = 0; u < use.used_num; u++)
        if (driver_load(use.used[u], sm) < 0)
            return -1;
    return 0;
}

/* "30 25": that much of each device, in order; the last number is for the rest, too. */
static int set_loads(const char *text)
{
    int sm = 0, read = 0;
    for (int u = 0; u < use.used_num; u++, text += read, read = 0) {
        sscanf(text, " %d%n", &sm, &read);
        if (driver_load(use.used[u], sm) < 0)
            return -1;
    }
    option.load = sm;
    return 0;
}

/* CUDA's own start, between the slot and the first context. */
static void init_cuda(void)
{
    char c = 0;
    if (option.init_waits) {
        print_event("slot", getpid());
        while (c != '\n')
            if (read(STDIN_FILENO, &c, 1) <= 0)
                exit(5);
    }
}

/* All that happens between main() and the first kernel, for a new process and for a forked child. */
static void become_tenant(void)
{
    if (region_lock(&region) < 0 || (slot_at_start = slot_take(&region, getpid())) < 0)
        exit(3);
    region_unlock(&region);
    init_cuda();
    int told = broker_number(option.broker_socket);
    if (told)
        set_own_hostpid(told);
    if (option.driver_socket) {
        if (driver_connect(option.driver_socket) < 0 || nvml_open() < 0)
            exit(4);
        int by_list = !told && strcmp(option.guess, "list") == 0, guessed = make_contexts(&use, by_list);
        if (by_list && guessed)
            set_own_hostpid(guessed);
        account_memory();
    }
    if (!told && strcmp(option.guess, "list") != 0 && strcmp(option.guess, "none") != 0)
        set_own_hostpid(forced_hostpid());
    if (option.driver_socket && (watcher_start(&region, &use, &ways) != 0 || set_load(option.load) < 0))
        exit(4);
}

/* ---- answering ---------------------------------------------------------------------------------------------------- */

static void print_slot(int index)
{
    printf("{\"index\":%d,\"pid\":%d,\"hostpid\":%d,\"status\":%d,\"sm_util\":[", index, *slot_pid(&region, index),
           *slot_hostpid(&region, index), *slot_status(&region, index));
    for (int d = 0; d < option.uuid_num; d++) {
        uint64_t *sm = slot_sm_util(&region, index, d);
        printf(sm ? "%s%lu" : "%snull", d ? "," : "", sm ? (unsigned long)*sm : 0);
    }
    printf("],\"monitorused\":[");
    for (int d = 0; d < option.uuid_num; d++)
        printf("%s%lu", d ? "," : "", (unsigned long)*slot_monitorused(&region, index, d));
    printf("]}");
}

static void print_own_slot(void)
{
    int own = slot_own(&region, getpid());
    if (own < 0)
        printf("{\"error\":\"no slot\"}");
    else
        print_slot(own);
    printf("\n");
}

static void print_slots(void)
{
    printf("[");
    for (int i = 0; i < *region_proc_num(&region) && i < REGION_SLOTS; i++) {
        printf("%s", i ? "," : "");
        print_slot(i);
    }
    printf("]\n");
}

static void print_event(const char *event, int ns_pid)
{
    printf("{\"event\":\"%s\",\"ns_pid\":%d}\n", event, ns_pid);
    fflush(stdout);
}

static void leave(int signals)
{
    (void)signals;
    slot_exit(&region, getpid());
    exit(0);
}

static void wait_for_signal(int signals)
{
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) < 0 && errno == EINTR)
        ;
    leave(signals);
}

/* As upstream a child opens, writes and maps the file anew when it first uses CUDA, and keeps what it inherited. */
static void fork_child(int signals)
{
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) {
        printf("{\"error\":\"fork\"}\n");
    } else if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        driver_forget();
        if (region_open(&region, region.layout, option.cache, &setup) < 0)
            exit(1);
        become_tenant();
        print_event("forked", getpid());
        wait_for_signal(signals);
    }
}

static void answer(const char *line, int signals)
{
    int number;
    if (sscanf(line, "load %d", &number) == 1)
        printf(set_loads(line + 5) == 0 ? "{\"load\":%d}\n" : "{\"error\":\"load %d\"}\n", number);
    else if (sscanf(line, "memory %d", &number) == 1) {
        option.memory = (uint64_t)number;
        account_memory();
        printf("{\"memory\":%d}\n", number);
    }
    else if (sscanf(line, "hostpid %d", &number) == 1) {
        set_own_hostpid(number);
        print_own_slot();
    } else if (strcmp(line, "busy") == 0)
        printf("{\"busy_us\":%lld}\n", cuda_busy_us());
    else if (strcmp(line, "slot") == 0)
        print_own_slot();
    else if (strcmp(line, "slots") == 0)
        print_slots();
    else if (strcmp(line, "fork") == 0)
        fork_child(signals);
    else if (strcmp(line, "lock") == 0)
        printf("{\"locked\":%s}\n", region_lock(&region) == 0 ? "true" : "false");
    else if (strcmp(line, "unlock") == 0) {
        region_unlock(&region);
        printf("{\"locked\":false}\n");
    } else if (strcmp(line, "compact") == 0 && region_lock(&region) == 0) {
        slots_remove_dead(&region);
        region_unlock(&region);
        printf("{\"proc_num\":%d}\n", *region_proc_num(&region));
    } else if (strcmp(line, "quit") == 0)
        leave(signals);
    else
        printf("{\"error\":\"unknown command\"}\n");
    fflush(stdout);
}

static void serve(int signals)
{
    char text[4096];
    size_t have = 0;
    struct pollfd wait[2] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
    for (;;) {
        if (poll(wait, 2, -1) < 0)
            continue;
        if (wait[1].revents)
            leave(signals);
        ssize_t n = read(STDIN_FILENO, text + have, sizeof text - 1 - have);
        if (n <= 0)
            leave(signals);
        have += (size_t)n;
        text[have] = 0;
        for (char *end; (end = strchr(text, '\n'));) {
            *end = 0;
            answer(text, signals);
            have -= (size_t)(end + 1 - text);
            memmove(text, end + 1, have + 1);
        }
    }
}

/* ---- the command line ------------------------------------------------------------------------------------------- */

static void parse(int argc, char **argv)
{
    static const struct option names[] = {
        {"cache", 1, NULL, 'c'},        {"layout", 1, NULL, 'l'},       {"driver-socket", 1, NULL, 'd'},
        {"guess", 1, NULL, 'g'},        {"uuid", 1, NULL, 'u'},         {"use", 1, NULL, 'U'},
        {"load", 1, NULL, 'L'},         {"slots", 1, NULL, 's'},        {"priority", 1, NULL, 'p'},
        {"sm-limit", 1, NULL, 'S'},     {"memory", 1, NULL, 'm'},       {"memory-limit", 1, NULL, 'M'},
        {"mover", 1, NULL, 'n'},        {"lock-timeout-ms", 1, NULL, 't'}, {"lock-tries", 1, NULL, 'T'},
        {"broker-socket", 1, NULL, 'b'}, {"zeroes", 1, NULL, 'z'},      {"fills", 1, NULL, 'f'},
        {"keep-monitorused", 0, NULL, 'k'}, {"cached-slot", 0, NULL, 'C'},
        {"init-waits", 0, NULL, 'I'},
        {"removes-itself", 0, NULL, 'R'}, {"clears-moved", 0, NULL, 'V'},
        {"cuda-order", 1, NULL, 'o'},   {"asks-cuda-number", 0, NULL, 'a'},
        {"ends", 0, NULL, 'e'},         {"second-call", 0, NULL, '2'},
        {NULL, 0, NULL, 0},
    };
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (c) {
        case 'c': option.cache = optarg; break;
        case 'l': option.layout = optarg; break;
        case 'd': option.driver_socket = optarg; break;
        case 'g': option.guess = optarg; break;
        case 'u': if (option.uuid_num < REGION_DEVICES) option.uuids[option.uuid_num++] = optarg; break;
        case 'U': if (option.used_num < REGION_DEVICES) option.used[option.used_num++] = optarg; break;
        case 'L': option.load = atoi(optarg); break;
        case 's': option.slots = atoi(optarg); break;
        case 'p': option.priority = atoi(optarg); break;
        case 'S': option.sm_limit = strtoull(optarg, NULL, 10); break;
        case 'm': option.memory = strtoull(optarg, NULL, 10); break;
        case 'M': option.memory_limit = strtoull(optarg, NULL, 10); break;
        case 'n': option.moves = atol(optarg); break;
        case 't': option.lock_timeout_ms = atoi(optarg); break;
        case 'b': option.broker_socket = optarg; break;
        case 'T': option.lock_tries = atoi(optarg); break;
        case 'z': ways.zeroes_all = strcmp(optarg, "all") == 0; break;
        case 'f': ways.fills = *optarg == 'a' ? FILLS_ADD : *optarg == 'n' ? FILLS_NOTHING : FILLS_SET; break;
        case 'k': ways.keeps_monitorused = 1; break;
        case 'C': option.cached_slot = 1; break;
        case 'I': option.init_waits = 1; break;
        case 'R': region.removes_itself = 1; break;
        case 'V': region.clears_moved = 1; break;
        case 'e': option.ends = 1; break;
        case '2': ways.second_call = 1; break;
        case 'a': ways.asks_cuda_number = 1; break;
        case 'o':
            for (char *at = optarg; *at && option.visible < REGION_DEVICES; at += *at == ',')
                option.order[option.visible++] = (int)strtol(at, &at, 10);
            break;
        default: exit(2);
        }
    if (!option.cache || !option.uuid_num || !layout_by_name(option.layout)) {
        fprintf(stderr, "tenant: --cache, at least one --uuid, and a known --layout are needed\n");
        exit(2);
    }
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGCHLD, SIG_IGN);
    int signals = signalfd(-1, &set, SFD_CLOEXEC);
    use = (struct gpu_use){option.uuids, option.uuid_num, option.used_num ? option.used : option.uuids,
                           option.used_num ? option.used_num : option.uuid_num,
                           option.visible ? option.order : NULL, option.visible, option.memory};
    setup = (struct region_setup){option.uuids, option.uuid_num, option.memory_limit, option.sm_limit, option.priority};
    region.lock_timeout_ms = option.lock_timeout_ms;
    region.lock_tries = option.lock_tries;
    if (region_open(&region, layout_by_name(option.layout), option.cache, &setup) < 0)
        return 1;
    if (option.moves)
        return mover_run(&region, option.moves, option.slots, option.ends);
    become_tenant();
    print_event("ready", getpid());
    serve(signals);
}
