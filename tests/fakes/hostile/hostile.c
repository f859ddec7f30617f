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
 *   hostile SECONDS extents FILE COUNT        drops FILE's pages from the cache, and frees COUNT extents beyond its end, again
 *                                             and again: who reads it waits for its lock
 *   hostile SECONDS cuts FILE...              cuts each to nothing and makes it whole again
 *   hostile SECONDS protects FILE COUNT       COUNT shared mappings beside FILE's, and eight threads that change the rights of them
 *   hostile SECONDS copies MOUNTS             eight processes that copy a mount namespace with so many mounts, again and again
 *   hostile SECONDS names DIRECTORY COUNT     makes and removes so many names in DIRECTORY, which keeps the size that it had, then one
 *                                             name again and again
 *   hostile SECONDS removes DIRECTORY COUNT   removes a directory in it that had so many names, and makes it anew
 *   hostile SECONDS flight COUNT              keeps so many descriptors in flight, or as many as its limit allows
 *   hostile SECONDS bodies PATH CONNECTIONS BYTES
 *                                             sends CONNECTIONS requests with a body of BYTES but for the last one
 *   hostile SECONDS groups RATE               joins 65,536 supplementary groups, and forks RATE times a second; each child lives a second
 *   hostile SECONDS locks FILE COUNT          COUNT locks, by a user of FILE, and four processes that read /proc/locks
 *   hostile SECONDS holes FILE PROCESSES      so many with 65,000 mappings of one page of FILE, where a hole is punched again and again
 *   hostile SECONDS passes PATH LINGER        sends requests, each with the last reference of a TCP socket that lingers for LINGER
 *                                             seconds with unsent data
 *   hostile SECONDS maps FILE private|memfd   has FILE open and maps it privately, or a memfd of its name in its place
 *   hostile SECONDS leases FILE               takes a lease on it, for writing and for reading in turns, again and again
 *   hostile SECONDS uring FILE                writes, preallocates and truncates it through io_uring, as fast as it can
 *   hostile SECONDS opens FILE MOUNTS FILES   maps FILE, and holds so many files open for writing, behind so many mounts
 *
 * Each ends after SECONDS at the latest, whoever has forgotten it, and with the process that started it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

static void own_mounts(void)
{
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
        fail("a mount namespace of a user's own");
    put("/proc/self/setgroups", "deny");
    put("/proc/self/uid_map", "0 0 1");
    put("/proc/self/gid_map", "0 0 1");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("t", "/tmp", "tmpfs", 0, NULL))
        fail("mount");
}

static void mounts(int doublings)
{
    char path[32];
    own_mounts();
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
    int util = strcmp(argv[0], "hostpid") != 0, zero = strcmp(argv[0], "zero") == 0, files = 0;
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
                    else if (zero)
                        *value = 0;
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

static int use(const char *path)
{
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) ||
        mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED)
        fail(path);
    return fd;
}

static void child(void (*work)(const char *, long), const char *path, long count)
{
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            work(path, count);
    }
}

static void drop(const char *path, long count)
{
    (void)count;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fdatasync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
        fail(path);
    close(fd);
    rest(1000000);
}

static void extents(const char *path, long count)
{
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC), first = 1;
    if (fd < 0 || fstat(fd, &info))
        fail(path);
    child(drop, path, 0);
    for (;; first = 0) {
        for (long i = 1; i <= count; i++) /* with a hole after each */
            if (fallocate(fd, FALLOC_FL_KEEP_SIZE, (info.st_size / 4096 + 2 * i) * 4096, 4096))
                fail("fallocate");
        if (first)
            ready();
        if (ftruncate(fd, info.st_size))
            fail("ftruncate");
    }
}

static void cuts(char **paths)
{
    struct stat info;
    int files[MOST_FILES], count = 0;
    for (; *paths && count < MOST_FILES; paths++, count++)
        if ((files[count] = open(*paths, O_RDWR | O_CLOEXEC)) < 0 || fstat(files[count], &info))
            fail(*paths);
    size_t size = (size_t)info.st_size, start = 65536; /* its header and first slots */
    char *whole = malloc(size);
    if (!whole || pread(files[0], whole, size, 0) != (ssize_t)size)
        fail("read");
    ready();
    for (;; rest(3000000))
        for (int i = 0; i < count; i++) {
            if (ftruncate(files[i], 0))
                fail("ftruncate");
            rest(200000);
            if (ftruncate(files[i], (off_t)size) || pwrite(files[i], whole, start, 0) != (ssize_t)start ||
                pwrite(files[i], whole + size - 4096, 4096, (off_t)size - 4096) != 4096)
                fail("write");
        }
}

static char *protected;
static long protected_pages;

static void *protect(void *number)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (unsigned turn = 0;; turn++)
        for (long i = (long)(intptr_t)number; i < protected_pages; i += 8)
            mprotect(protected + (size_t)i * 2 * page, page, turn & 1 ? PROT_READ | PROT_WRITE : PROT_READ);
    return NULL;
}

static void protects(const char *path, long count)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int fd = memfd_create("protected", MFD_CLOEXEC);
    pthread_t thread;
    protected_pages = count;
    protected = mmap(NULL, page * 2 * (size_t)count, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fd < 0 || ftruncate(fd, (off_t)(page * 2 * (size_t)count)) || protected == MAP_FAILED)
        fail("memfd_create");
    for (long i = 0; i < count; i++) {
        off_t at = i * 2 * (off_t)page;
        if (mmap(protected + at, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, at) == MAP_FAILED)
            fail("mmap");
    }
    use(path);
    for (intptr_t i = 0; i < 8; i++)
        if (pthread_create(&thread, NULL, protect, (void *)i))
            fail("pthread_create");
    ready();
    for (;;)
        pause();
}

static void copy(const char *path, long count)
{
    (void)path, (void)count;
    if (unshare(CLONE_NEWNS)) /* the last one goes with it */
        fail("unshare");
}

static void bind_mounts(long count)
{
    char path[32];
    for (long i = 0; i < count; i++) {
        snprintf(path, sizeof path, "/tmp/%ld", i);
        if (mkdir(path, 0700) || mount(path, path, NULL, MS_BIND, NULL))
            fail(path);
    }
}

static void copies(long count)
{
    own_mounts();
    bind_mounts(count);
    for (int i = 0; i < 8; i++)
        child(copy, "", 0);
    ready();
    for (;;)
        pause();
}

static void swell(const char *path, long count) /* with few long names for many short ones */
{
    char name[4096];
    for (int made = 1; made >= 0; made--)
        for (long i = 0; i < count / 16; i++) {
            snprintf(name, sizeof name, "%s/%0240ld", path, i);
            int fd = made ? open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666) : unlink(name);
            if (fd < 0)
                fail("a long name");
            if (made)
                close(fd);
        }
}

static void names(const char *path, long count)
{
    char name[4096];
    swell(path, count);
    ready();
    for (;; rest(1000000)) {
        snprintf(name, sizeof name, "%s/new.cache", path);
        close(open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
        unlink(name);
    }
}

static void removes(const char *path, long count)
{
    char name[4096];
    for (int first = 1;; first = 0) {
        snprintf(name, sizeof name, "%s/large.cache", path);
        if (mkdir(name, 0777))
            fail(name);
        swell(name, count);
        if (first)
            ready();
        if (rmdir(name))
            fail(name);
    }
}

static void opens(const char *path, long mounted, long files)
{
    struct rlimit most;
    char name[64];
    int fd = use(path);
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    own_mounts();
    bind_mounts(mounted);
    for (long i = 0; i < files; i++) {
        snprintf(name, sizeof name, "/tmp/%ld/%ld", mounted - 1 - i % mounted, i);
        if (open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600) < 0)
            fail(name);
    }
    (void)fd;
    ready();
    for (;;)
        pause();
}

static void maps(const char *path, int private)
{
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC), mapped = private ? fd : memfd_create(path, 0);
    if (fd < 0 || mapped < 0 || fstat(fd, &info) || (!private && ftruncate(mapped, info.st_size)))
        fail(path);
    int kind = private ? MAP_PRIVATE : MAP_SHARED;
    char *region = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, kind, mapped, 0);
    if (region == MAP_FAILED)
        fail("mmap");
    region[info.st_size - 1] = 1;
    ready();
    for (;;)
        pause();
}

static void leases(const char *path)
{
    signal(SIGIO, SIG_IGN); /* somebody opens it: it is let go of in its own time */
    for (int first = 1;; first = 0) {
        int held = open(path, O_RDONLY | O_CLOEXEC);
        if (held < 0)
            continue;
        for (int turn = 0; turn < 10; turn++) {
            fcntl(held, F_SETLEASE, turn & 1 ? F_RDLCK : F_WRLCK); /* refused while others have it open */
            rest(10000000);
            fcntl(held, F_SETLEASE, F_UNLCK);
        }
        close(held);
        if (first)
            ready();
    }
}

#define RING 32

static void uring(const char *path)
{
    static struct iovec byte = {"", 1};
    struct io_uring_params made = {0};
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC), ring = (int)syscall(SYS_io_uring_setup, RING, &made);
    if (fd < 0 || fstat(fd, &info) || ring < 0)
        fail("io_uring_setup");
    int rights = PROT_READ | PROT_WRITE;
    char *queues = mmap(NULL, 1 << 16, rights, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *orders = mmap(NULL, RING * sizeof *orders, rights, MAP_SHARED, ring, IORING_OFF_SQES);
    if (queues == MAP_FAILED || orders == MAP_FAILED)
        fail("mmap");
    uint32_t *tail = (uint32_t *)(queues + made.sq_off.tail), *array = (uint32_t *)(queues + made.sq_off.array);
    for (int first = 1;; first = 0) {
        for (uint32_t i = 0; i < RING; i++) {
            struct io_uring_sqe *order = orders + i;
            *order = (struct io_uring_sqe){.opcode = IORING_OP_WRITEV, .fd = fd, .addr = (uintptr_t)&byte, .len = 1};
            order->off = (uint64_t)info.st_size - 1;
            if (i % 4 == 1) /* the length is where a write has its address; the mode is FALLOC_FL_KEEP_SIZE */
                *order = (struct io_uring_sqe){.opcode = IORING_OP_FALLOCATE, .fd = fd, .addr = 4096, .len = 1,
                                               .off = (uint64_t)info.st_size + 4096 * i};
            if (i % 4 == 3)
                *order = (struct io_uring_sqe){.opcode = 55 /* FTRUNCATE, Linux 6.9 */, .fd = fd,
                                               .off = (uint64_t)info.st_size};
            array[(*tail + i) % RING] = i;
        }
        __atomic_store_n(tail, *tail + RING, __ATOMIC_RELEASE);
        if (syscall(SYS_io_uring_enter, ring, RING, RING, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
            fail("io_uring_enter");
        uint32_t *seen = (uint32_t *)(queues + made.cq_off.head); /* all answers are taken, unread */
        __atomic_store_n(seen, *(uint32_t *)(queues + made.cq_off.tail), __ATOMIC_RELEASE);
        if (first)
            ready();
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

static void flight(long count)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(253 * sizeof(int))];
    } control = {.head = {CMSG_LEN(253 * sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec byte = {.iov_base = "", .iov_len = 1};
    struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct rlimit most;
    int pair[2] = {-1, -1};
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    memset(CMSG_DATA(&control.head), 0, 253 * sizeof(int)); /* standard input, again and again */
    for (long sent = 0; sent < count;) {
        if (pair[0] >= 0 && sendmsg(pair[0], &message, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
            sent += 253;
        else if (pair[0] >= 0 && errno == ETOOMANYREFS)
            break;
        else if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
            fail("socketpair");
    }
    ready();
    for (;;)
        pause();
}

static void groups(long rate)
{
    static gid_t all[65536];
    for (unsigned i = 0; i < 65536; i++)
        all[i] = 100000 + i;
    if (setgroups(65536, all))
        fail("setgroups");
    signal(SIGCHLD, SIG_IGN);
    ready();
    for (;; rest(1000000000 / rate))
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            rest(1000000000);
            _exit(0);
        }
}

static void read_locks(const char *path, long count)
{
    static char data[1 << 16];
    int fd = open("/proc/locks", O_RDONLY | O_CLOEXEC);
    (void)path, (void)count;
    while (fd >= 0 && read(fd, data, sizeof data) > 0)
        ;
    close(fd);
}

static void locks(const char *path, long count)
{
    int fd = use(path);
    for (long i = 0; i < count; i++) {
        if (i % 1000 == 0) /* the kernel walks all locks of a file for each new one */
            fd = memfd_create("locks", MFD_CLOEXEC);
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2 * i, .l_len = 1};
        if (fcntl(fd, F_SETLK, &lock))
            fail("fcntl");
    }
    for (int i = 0; i < 4; i++)
        child(read_locks, path, 0);
    ready();
    for (;;)
        pause();
}

static void hold_page(const char *path, long count)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    for (long i = 0; i < count; i++) {
        volatile char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 1 << 20);
        if (page == MAP_FAILED)
            break;
        (void)*page;
    }
    for (;;)
        pause();
}

static void holes(const char *path, long processes)
{
    int fd = use(path);
    for (long i = 0; i < processes; i++)
        child(hold_page, path, 65000);
    rest(3000000000);
    child(drop, path, 0);
    ready();
    for (;; rest(1000000))
        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1 << 20, 4096))
            fail("fallocate");
}

static int lingering(int seconds) /* its peer is never closed, and reads nothing */
{
    static char data[1 << 16];
    struct linger wait = {1, seconds};
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof place;
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || bind(server, (struct sockaddr *)&place, size) || listen(server, 1) ||
        getsockname(server, (struct sockaddr *)&place, &size) || connect(fd, (struct sockaddr *)&place, size) ||
        accept(server, NULL, NULL) < 0 || setsockopt(fd, SOL_SOCKET, SO_LINGER, &wait, sizeof wait))
        fail("a socket that lingers");
    close(server);
    while (send(fd, data, sizeof data, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        ;
    return fd;
}

static void passes(const char *path, int seconds)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    static char text[] = "GET /v1/lookup?pid=1 HTTP/1.1\r\nHost: r\r\n\r\n";
    struct iovec request = {.iov_base = text, .iov_len = sizeof text - 1};
    struct msghdr message = {.msg_iov = &request, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ready();
    for (;; rest(20000000)) {
        int fd = lingering(seconds), client = knock(path);
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
        int sent = client < 0 ? -1 : (int)sendmsg(client, &message, MSG_NOSIGNAL);
        if (sent < 0) /* Linux 6.16 lets the server forbid it; it must not cost this process its time */
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
        close(fd);
        if (client >= 0)
            close(client);
        if (sent < 0)
            rest(100000000);
    }
}

static void bodies(const char *path, long connections, long bytes)
{
    char head[256];
    char *body = calloc(1, (size_t)bytes);
    ready();
    for (;; rest(1000000000)) {
        int held[MOST_CONNECTIONS];
        for (long i = 0; i < connections; i++) {
            if ((held[i] = knock(path)) < 0)
                continue;
            int length = snprintf(head, sizeof head,
                                  "POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
                                  "Content-Length: %ld\r\n\r\n", bytes);
            send(held[i], head, (size_t)length, MSG_NOSIGNAL);
            send(held[i], body, (size_t)bytes - 1, MSG_NOSIGNAL);
        }
        for (long i = 0; i < connections; i++)
            if (held[i] >= 0) {
                struct pollfd closed = {.fd = held[i], .events = POLLIN};
                poll(&closed, 1, 5000);
                close(held[i]);
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
    if (strcmp(argv[2], "extents") == 0 && argc == 5)
        extents(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "flight") == 0)
        flight(atol(argv[3]));
    if (strcmp(argv[2], "bodies") == 0 && argc == 6 && atol(argv[4]) <= MOST_CONNECTIONS)
        bodies(argv[3], atol(argv[4]), atol(argv[5]));
    if (strcmp(argv[2], "groups") == 0)
        groups(atol(argv[3]));
    if (strcmp(argv[2], "locks") == 0 && argc == 5)
        locks(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "holes") == 0 && argc == 5)
        holes(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "passes") == 0 && argc == 5)
        passes(argv[3], atoi(argv[4]));
    if (strcmp(argv[2], "cuts") == 0)
        cuts(argv + 3);
    if (strcmp(argv[2], "protects") == 0 && argc == 5)
        protects(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "copies") == 0)
        copies(atol(argv[3]));
    if (strcmp(argv[2], "names") == 0 && argc == 5)
        names(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "removes") == 0 && argc == 5)
        removes(argv[3], atol(argv[4]));
    if (strcmp(argv[2], "opens") == 0 && argc == 6)
        opens(argv[3], atol(argv[4]), atol(argv[5]));
    if (strcmp(argv[2], "maps") == 0 && argc == 5)
        maps(argv[3], strcmp(argv[4], "private") == 0);
    if (strcmp(argv[2], "leases") == 0)
        leases(argv[3]);
    if (strcmp(argv[2], "uring") == 0)
        uring(argv[3]);
    if (strcmp(argv[2], "knocks") == 0)
        knocks(argv[3]);
    if (strcmp(argv[2], "holds") == 0 && argc == 6)
        holds(seconds, argv[3], atoi(argv[4]), atoi(argv[5]));
    return 2;
}
