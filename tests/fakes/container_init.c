/*
 * Starts a container in miniature and stays as its first process.
 *
 *   container-init --control FD --parent PID --bind DIR [--at PATH] [--pidns new|host|/proc/N/ns/pid]
 *                  [--cgroup PROCS_FILE ...] [--rights MASK] [--broker DIR]
 *
 * The launcher joins or makes the PID namespace and forks; the child enters the cgroups, gets its own mount and
 * cgroup namespaces, its own /proc, DIR at /usr/local/vgpu, or wherever else below /usr/local or /tmp, and the broker's
 * DIR, read-only, at /usr/local/hostpid. With something at /tmp/... its /tmp is its own, but for directories in there.
 * Nothing of that reaches the host's mount table.
 * Then it serves the control socket (SOCK_SEQPACKET):
 *
 *   in:  a flag byte ('n': in a PID namespace of its own, '-': not), then the arguments, each ended by a zero
 *        byte, with two descriptors: the new process's standard input and output
 *   out: "started" from the new process itself, so that the kernel puts its host PID into the credentials
 *
 * With --rights it and all it starts have these capabilities at most, in hexadecimal, as a runtime would set them.
 *
 * Every process here dies with its parent, whatever the parent dies of.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ARGUMENTS 128
#define MAX_CGROUPS 16

static int control;

static void fail(const char *what)
{
    fprintf(stderr, "container-init: %s: %s\n", what, strerror(errno));
    _exit(1);
}

/* Forks a child that is killed when the caller dies, even if that happens before the child has asked for it. */
static pid_t fork_bound(void)
{
    int lifeline[2];
    if (pipe2(lifeline, O_CLOEXEC) < 0)
        fail("pipe");
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child > 0) {
        close(lifeline[0]);
        return child; /* the write end stays open for as long as this process lives */
    }
    close(lifeline[1]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct pollfd end = {.fd = lifeline[0]};
    if (poll(&end, 1, 0) == 1 && (end.revents & POLLHUP))
        _exit(1);
    close(lifeline[0]);
    return 0;
}

static void own_mounts(int new_proc)
{
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        fail("mount namespace");
    if (new_proc && mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        fail("mount /proc");
}

static int open_directory(const char *source)
{
    int fd = open(source, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fail(source);
    return fd;
}

static void make_above(const char *target)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", target);
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
}

static void bind_at(int fd, const char *target)
{
    char through[64];
    snprintf(through, sizeof through, "/proc/self/fd/%d", fd);
    make_above(target);
    if ((mkdir(target, 0777) < 0 && errno != EEXIST) || mount(through, target, NULL, MS_BIND, NULL) < 0)
        fail(target);
    close(fd);
}

/* Its own /tmp, and what the node has in its own: the tests' directories. */
static void own_tmp(void)
{
    char through[64], path[PATH_MAX];
    int old = open_directory("/tmp");
    snprintf(through, sizeof through, "/proc/self/fd/%d", old);
    if (mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777") < 0)
        fail("mount /tmp");
    DIR *listing = opendir(through);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", through, entry->d_name);
        int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        snprintf(path, sizeof path, "/tmp/%s", entry->d_name);
        if (fd >= 0)
            bind_at(fd, path);
    }
    if (listing)
        closedir(listing);
    close(old);
}

static void bind_directories(const char *vgpu, const char *at, const char *broker)
{
    int fd = open_directory(vgpu), broker_fd = broker ? open_directory(broker) : -1;
    /* A tmpfs first: the host need not have /usr/local/vgpu, and must not get one. */
    if (mount("tmpfs", "/usr/local", "tmpfs", 0, "mode=755") < 0)
        fail("mount /usr/local");
    if (strncmp(at, "/tmp/", 5) == 0)
        own_tmp();
    bind_at(fd, at);
    if (!broker)
        return;
    bind_at(broker_fd, "/usr/local/hostpid");
    if (mount(NULL, "/usr/local/hostpid", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) < 0)
        fail("read-only /usr/local/hostpid");
}

static void enter_cgroup(const char *procs_file)
{
    int fd = open(procs_file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) != 1)
        fail(procs_file);
    close(fd);
}

static void limit_rights(unsigned long long mask)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct halves[2] = {{0}};
    for (int number = 0; prctl(PR_CAPBSET_READ, number) >= 0; number++)
        if (!(mask >> number & 1) && prctl(PR_CAPBSET_DROP, number) < 0)
            fail("bounding set");
    if (syscall(SYS_capget, &header, halves) < 0)
        fail("capget");
    for (int i = 0; i < 2; i++) {
        halves[i].effective = halves[i].permitted &= (unsigned)(mask >> 32 * i);
        halves[i].inheritable = 0;
    }
    if (syscall(SYS_capset, &header, halves) < 0)
        fail("capset");
}

static void say_started(void)
{
    if (send(control, "started", 7, MSG_NOSIGNAL) != 7)
        _exit(1);
}

static void become(char **argv, const int fds[2], int nested)
{
    if (nested) {
        if (unshare(CLONE_NEWPID) < 0)
            fail("nested PID namespace");
        if (fork_bound() > 0) {
            while (wait(NULL) > 0 || errno == EINTR)
                ;
            _exit(0);
        }
        own_mounts(1);
    }
    dup2(fds[0], STDIN_FILENO);
    dup2(fds[1], STDOUT_FILENO);
    signal(SIGCHLD, SIG_DFL);
    say_started();
    execv(argv[0], argv);
    fail(argv[0]);
}

/* One request: returns 0 when the other side has gone. */
static int serve_one(void)
{
    static char text[16384];
    char *argv[MAX_ARGUMENTS + 1];
    int fds[2] = {-1, -1}, argc = 0;
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof fds)];
    } ancillary;
    struct iovec part = {.iov_base = text, .iov_len = sizeof text - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary,
                             .msg_controllen = sizeof ancillary};
    ssize_t n = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
    if (n <= 0)
        return n < 0 && errno == EINTR;
    struct cmsghdr *got = CMSG_FIRSTHDR(&message);
    if (!got || got->cmsg_type != SCM_RIGHTS || got->cmsg_len != CMSG_LEN(sizeof fds))
        fail("a request without two descriptors");
    memcpy(fds, CMSG_DATA(got), sizeof fds);
    text[n] = 0;
    for (char *word = text + 1; word < text + n && argc < MAX_ARGUMENTS; word += strlen(word) + 1)
        argv[argc++] = word;
    argv[argc] = NULL;
    if (fork_bound() == 0)
        become(argv, fds, text[0] == 'n');
    close(fds[0]);
    close(fds[1]);
    return 1;
}

static void use_pidns(const char *which)
{
    if (strcmp(which, "host") == 0)
        return;
    if (strcmp(which, "new") == 0) {
        if (unshare(CLONE_NEWPID) < 0)
            fail("PID namespace");
        return;
    }
    int fd = open(which, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWPID) < 0)
        fail(which);
    close(fd);
}

int main(int argc, char **argv)
{
    static const struct option names[] = {{"control", 1, NULL, 'c'}, {"parent", 1, NULL, 'p'}, {"bind", 1, NULL, 'b'},
                                          {"broker", 1, NULL, 'B'},  {"at", 1, NULL, 'a'},
                                          {"pidns", 1, NULL, 'n'},   {"cgroup", 1, NULL, 'g'},
                                          {"rights", 1, NULL, 'r'},  {NULL, 0, NULL, 0}};
    const char *bind = NULL, *at = "/usr/local/vgpu", *broker = NULL, *pidns = "new", *cgroups[MAX_CGROUPS];
    int cgroup_num = 0, status;
    unsigned long long rights = ~0ULL;
    pid_t parent = 0;
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (c) {
        case 'c': control = atoi(optarg); break;
        case 'p': parent = atoi(optarg); break;
        case 'r': rights = strtoull(optarg, NULL, 16); break;
        case 'b': bind = optarg; break;
        case 'B': broker = optarg; break;
        case 'a': at = optarg; break;
        case 'n': pidns = optarg; break;
        case 'g': if (cgroup_num < MAX_CGROUPS) cgroups[cgroup_num++] = optarg; break;
        default: return 2;
        }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || !bind)
        return 2;
    fcntl(control, F_SETFD, FD_CLOEXEC);
    use_pidns(pidns);
    pid_t child = fork_bound();
    if (child > 0) {
        close(control);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    for (int i = 0; i < cgroup_num; i++)
        enter_cgroup(cgroups[i]);
    if (cgroup_num && unshare(CLONE_NEWCGROUP) < 0)
        fail("cgroup namespace");
    own_mounts(strcmp(pidns, "host") != 0);
    bind_directories(bind, at, broker);
    if (rights != ~0ULL)
        limit_rights(rights);
    signal(SIGCHLD, SIG_IGN); /* as PID 1 it inherits orphans: the kernel reaps them all */
    say_started();
    while (serve_one())
        ;
    return 0;
}
