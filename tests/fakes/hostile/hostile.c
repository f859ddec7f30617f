/* What a tenant can do to cost others as much as it can, with no more rights than its container has.
 *
 *   hostile SECONDS mappings COUNT            COUNT mappings that cannot be merged; says "ready" and waits
 *   hostile SECONDS mounts DOUBLINGS          a mount table of its own, by a user namespace, with 2^DOUBLINGS lines and more;
 *                                             says "ready" and waits
 *   hostile SECONDS flip hostpid|util PROCS SLOT_SIZE OFFSET STEP MILLISECONDS FILE...
 *                                             writes a word of each of 1,024 slots anew, again and again: `hostpid` at
 *                                             OFFSET, or those that are 0 of 16 utilizations from OFFSET on, each STEP
 *                                             after the other
 *   hostile SECONDS events FILE NEW           opens FILE, writes its last byte and closes it, and makes and removes NEW, as
 *                                             fast as it can
 *   hostile SECONDS scrapes PORT RATE         connects to 127.0.0.1, asks for /metrics, closes; RATE times a second
 *   hostile SECONDS knocks PATH               connects to a Unix socket and closes, as fast as it is let
 *   hostile SECONDS holds PATH NAMESPACES CONNECTIONS
 *                                             that many PID namespaces below its own (by user namespaces), each of
 *                                             which holds that many connections and makes anew those that it loses
 *
 * Each ends after SECONDS at the latest, whoever has forgotten it, and with the process that started it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 1024
#define DEVICES 16
#define MOST_FILES 8
#define MOST_CONNECTIONS 256

static void fail(const char *what)
{
    fprintf(stderr, "hostile: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void ready(void)
{
    puts("ready");
    fflush(stdout);
}

static void rest(long nanoseconds)
{
    struct timespec pause = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    nanosleep(&pause, NULL);
}

static void mappings(int count)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *all = mmap(NULL, page * (size_t)count, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        fail("mmap");
    for (int i = 1; i < count; i += 2) /* neighbours with other rights stay apart */
        if (mprotect(all + page * (size_t)i, page, PROT_READ | PROT_WRITE))
            fail("mprotect");
    ready();
    for (;;)
        pause();
}

static void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        fail(path);
    close(fd);
}

static void mounts(int doublings)
{
    char path[32];
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
        fail("a mount namespace of a user's own");
    put("/proc/self/setgroups", "deny");
    put("/proc/self/uid_map", "0 0 1");
    put("/proc/self/gid_map", "0 0 1");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("t", "/tmp", "tmpfs", 0, NULL))
        fail("mount");
    for (int i = 0; i < doublings; i++) {
        snprintf(path, sizeof path, "/tmp/%d", i);
        if (mkdir(path, 0700) || mount("/tmp", path, NULL, MS_BIND | MS_REC, NULL))
            fail(path);
    }
    ready();
    for (;;)
        pause();
}

static void flip(char **argv)
{
    int util = strcmp(argv[0], "util") == 0, files = 0;
    size_t procs = strtoul(argv[1], NULL, 10), slot_size = strtoul(argv[2], NULL, 10);
    size_t offset = strtoul(argv[3], NULL, 10), step = strtoul(argv[4], NULL, 10);
    long every = atol(argv[5]) * 1000000;
    char *regions[MOST_FILES];
    for (char **name = argv + 6; *name && files < MOST_FILES; name++, files++) {
        struct stat info;
        int fd = open(*name, O_RDWR | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &info))
            fail(*name);
        regions[files] = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (regions[files] == MAP_FAILED)
            fail("mmap");
        close(fd);
    }
    ready();
    for (uint32_t turn = 0;; turn++) {
        for (int file = 0; file < files; file++)
            for (size_t slot = 0; slot < SLOTS; slot++)
                for (size_t device = 0; device < (util ? DEVICES : 1); device++) {
                    char *word = regions[file] + procs + slot * slot_size + offset + device * step;
                    volatile uint32_t *value = (uint32_t *)word;
                    if (!util)
                        *value = 1000000 + (uint32_t)slot + (turn & 1) * SLOTS;
                    else if (!*value) /* what stands is left to stand, so that each repair of it succeeds */
                        *value = 50;
                }
        rest(every);
    }
}

static void events(const char *path, const char *new)
{
    for (int first = 1;; first = 0) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        off_t end = fd < 0 ? -1 : lseek(fd, -1, SEEK_END);
        if (end < 0 || write(fd, "", 1) != 1)
            fail(path);
        close(fd);
        fd = open(new, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            fail(new);
        close(fd);
        unlink(new);
        if (first)
            ready();
    }
}

static void scrapes(int port, long rate)
{
    static const char question[] = "GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n";
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct timespec due;
    clock_gettime(CLOCK_MONOTONIC, &due);
    ready();
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        struct pollfd made = {.fd = fd, .events = POLLOUT};
        if (fd < 0)
            fail("socket");
        if (connect(fd, (struct sockaddr *)&place, sizeof place) == 0 ||
            (errno == EINPROGRESS && poll(&made, 1, 100) == 1))
            send(fd, question, sizeof question - 1, MSG_NOSIGNAL);
        close(fd);
        due.tv_nsec += 1000000000 / rate;
        if (due.tv_nsec >= 1000000000)
            due.tv_sec++, due.tv_nsec -= 1000000000;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    }
}

static int knock(const char *path)
{
    struct sockaddr_un place = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        fail("socket");
    snprintf(place.sun_path, sizeof place.sun_path, "%s", path);
    if (connect(fd, (struct sockaddr *)&place, sizeof place)) {
        close(fd);
        return -1;
    }
    return fd;
}

static void knocks(const char *path)
{
    ready();
    for (;;) {
        int fd = knock(path);
        if (fd < 0)
            rest(1000000);
        else
            close(fd);
    }
}

static void hold(const char *path, int count)
{
    struct pollfd held[MOST_CONNECTIONS];
    for (int i = 0; i < count; i++)
        held[i] = (struct pollfd){.fd = knock(path), .events = POLLIN};
    for (;;) {
        poll(held, (nfds_t)count, 100);
        for (int i = 0; i < count; i++) {
            char said[512];
            if (held[i].fd >= 0 && !(held[i].revents && recv(held[i].fd, said, sizeof said, MSG_DONTWAIT) <= 0))
                continue;
            if (held[i].fd >= 0)
                close(held[i].fd);
            held[i].fd = knock(path);
            rest(1000000);
        }
    }
}

static void holds(unsigned seconds, const char *path, int namespaces, int connections)
{
    if (connections > MOST_CONNECTIONS)
        connections = MOST_CONNECTIONS;
    for (int i = 0; i < namespaces; i++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(seconds);
            if (unshare(CLONE_NEWUSER | CLONE_NEWPID))
                fail("a PID namespace of a user's own");
            if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(seconds);
                    hold(path, connections);
            }
            for (;;)
                pause();
        }
    ready();
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    unsigned seconds = (unsigned)atoi(argv[1]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(seconds);
    if (strcmp(argv[2], "mappings") == 0)
        mappings(atoi(argv[3]));
    if (strcmp(argv[2], "mounts") == 0)
        mounts(atoi(argv[3]));
    if (strcmp(argv[2], "flip") == 0 && argc > 9)
        flip(argv + 3);
    if (strcmp(argv[2], "events") == 0 && argc == 5)
        events(argv[3], argv[4]);
    if (strcmp(argv[2], "scrapes") == 0 && argc == 5)
        scrapes(atoi(argv[3]), atol(argv[4]));
    if (strcmp(argv[2], "knocks") == 0)
        knocks(argv[3]);
    if (strcmp(argv[2], "holds") == 0 && argc == 6)
        holds(seconds, argv[3], atoi(argv[4]), atoi(argv[5]));
    return 2;
}
