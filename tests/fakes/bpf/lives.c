/* Odd lives of processes, one for each word on the command line, for a map of processes to be held to.
 *
 * Whoever is to be looked at says "ready" on standard output once it is in the state that its word names, and ends
 * when standard input is closed. Everything else is said beside its word below.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static char stack[256 * 1024] __attribute__((aligned(16)));
static char **arguments;

static void die(const char *what)
{
    fprintf(stderr, "lives: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        die("standard output");
}

static void until_closed(void)
{
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
}

static void ready(void)
{
    say("ready\n");
    until_closed();
}

static void must_wait(pid_t child)
{
    if (waitpid(child, NULL, 0) != child)
        die("waitpid");
}

/* wait: the plainest life */
static int wait_(void)
{
    ready();
    return 0;
}

static void *wait_and_end_all(void *unused)
{
    (void)unused;
    usleep(50000); /* the leader is gone by now */
    ready();
    _exit(0);
}

/* leader-first: the leader ends while a thread runs on */
static int leader_first(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, wait_and_end_all, NULL))
        die("pthread_create");
    pthread_exit(NULL);
}

static void *exec_wait(void *program)
{
    usleep(50000); /* it is seen before, too */
    execl(program, "lives", "wait", NULL);
    die("exec");
    return NULL;
}

/* thread-execs: a thread that is not the leader calls exec, and is the leader afterwards */
static int thread_execs(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, exec_wait, "/proc/self/exe"))
        die("pthread_create");
    pause();
    return 1;
}

static void *sleep_on(void *unused)
{
    (void)unused;
    for (;;)
        pause();
    return NULL;
}

/* threads N */
static int threads(void)
{
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 * 1024);
    for (int i = atoi(arguments[2]); i > 0; i--) {
        pthread_t thread;
        if (pthread_create(&thread, &small, sleep_on, NULL))
            die("pthread_create");
    }
    ready();
    return 0;
}

/* vfork: says "vforked" in the child, which borrows its parent's memory until a byte comes; then it execs */
static int vfork_(void)
{
    pid_t child = vfork();
    if (child == 0) {
        char byte;
        say("vforked\n");
        if (read(0, &byte, 1) != 1)
            _exit(1);
        execl("/proc/self/exe", "lives", "wait", NULL);
        _exit(1);
    }
    must_wait(child);
    return 0;
}

static int ready_in_namespace(void *unused)
{
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ready();
    return 0;
}

/* clone: straight into a new PID namespace */
static int clone_(void)
{
    pid_t child = clone(ready_in_namespace, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, NULL);
    if (child < 0)
        die("clone into a new PID namespace");
    must_wait(child);
    return 0;
}

/* nested N: N PID namespaces inside each other, the first process of each waiting for the next */
static int nested_at(int depth)
{
    if (depth == 0) {
        ready();
        return 0;
    }
    if (unshare(CLONE_NEWPID))
        die("unshare");
    pid_t child = fork();
    if (child < 0)
        die("fork");
    if (child == 0)
        _exit(nested_at(depth - 1));
    must_wait(child);
    return 0;
}

static int nested(void)
{
    return nested_at(atoi(arguments[2]));
}

/* enter FILE: setns into the PID namespace of that /proc file, and fork */
static int enter(void)
{
    int fd = open(arguments[2], O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWPID))
        die("setns");
    pid_t child = fork();
    if (child < 0)
        die("fork");
    if (child == 0)
        return ready_in_namespace(NULL);
    must_wait(child);
    return 0;
}

/* many N: N children that wait */
static int many(void)
{
    for (int i = atoi(arguments[2]); i > 0; i--) {
        pid_t child = fork();
        if (child < 0)
            die("fork");
        if (child == 0)
            sleep_on(NULL);
    }
    say("ready\n");
    until_closed();
    signal(SIGTERM, SIG_IGN);
    kill(0, SIGTERM); /* its own process group: whoever starts this gives it one */
    while (wait(NULL) > 0)
        ;
    return 0;
}

static void reuse_from(int fd, const char *last)
{
    if (pwrite(fd, last, strlen(last), 0) < 0)
        die("/proc/sys/kernel/ns_last_pid (CONFIG_CHECKPOINT_RESTORE)");
}

/* The first process of the storm's namespace: forks, keeps `kept` of its children alive, ends the oldest. */
static int storm_in_namespace(void *unused)
{
    int forks = atoi(arguments[2]), kept = atoi(arguments[3]), highest = atoi(arguments[4]), wraps = 0;
    pid_t *ring = calloc((size_t)kept, sizeof *ring);
    int last = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!ring || last < 0)
        die("/proc/sys/kernel/ns_last_pid");
    say("ready\n");
    for (int i = 0; i < forks; i++) {
        pid_t *place = &ring[i % kept];
        if (*place) {
            kill(*place, SIGKILL);
            must_wait(*place);
        }
        *place = fork();
        if (*place < 0)
            die("fork");
        if (*place == 0)
            sleep_on(NULL);
        if (*place >= highest) {
            reuse_from(last, "1");
            wraps++;
        }
    }
    printf("done %d\n", wraps);
    fflush(stdout);
    until_closed();
    return 0;
}

/* storm FORKS KEPT HIGHEST: in a new PID namespace whose numbers start again after HIGHEST; says "ready", then "done WRAPS" */
static int storm(void)
{
    pid_t child = clone(storm_in_namespace, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, NULL);
    if (child < 0)
        die("clone into a new PID namespace");
    must_wait(child);
    return 0;
}

static int family(void *unused)
{
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (child < 0)
            die("fork");
        if (child == 0)
            sleep_on(NULL);
    }
    say("ready\n");
    sleep_on(NULL);
    return 0;
}

/* row N: N PID namespaces one after the other, with four processes each; a byte ends one and asks for the next */
static int row(void)
{
    for (int i = atoi(arguments[2]); i > 0; i--) {
        char byte;
        pid_t child = clone(family, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, NULL);
        if (child < 0)
            die("clone into a new PID namespace");
        if (read(0, &byte, 1) != 1)
            return 1;
        kill(child, SIGKILL);
        must_wait(child);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *word;
        int arguments;
        int (*live)(void);
    } lives[] = {
        {"wait", 2, wait_},     {"leader-first", 2, leader_first}, {"thread-execs", 2, thread_execs},
        {"threads", 3, threads}, {"vfork", 2, vfork_},             {"clone", 2, clone_},
        {"nested", 3, nested},  {"enter", 3, enter},               {"many", 3, many},
        {"storm", 5, storm},    {"row", 3, row},
    };
    arguments = argv;
    for (size_t i = 0; i < sizeof lives / sizeof *lives; i++)
        if (argc == lives[i].arguments && !strcmp(argv[1], lives[i].word))
            return lives[i].live();
    fprintf(stderr, "lives: no such life, see the top of lives.c\n");
    return 2;
}
