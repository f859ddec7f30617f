/*
 * The main process of a test container: does the odd things in a process's life, one command a line on standard
 * input, and has every process tell its own PID over a datagram socket. The kernel adds the sender's PID as
 * the receiver sees it (SCM_CREDENTIALS), so the truth does not come from what is tested. Ends with its input.
 *
 *   fork N             N children that stay
 *   as PID             one child that stays and has this PID (ns_last_pid)
 *   thread             a thread that stays; it tells its thread id
 *   nest               a PID namespace of its own for an init and a child, both stay
 *   zombie             a child that has ended and is not waited for
 *   kill PID           kill a child and wait for it
 *   churn PID N USEC   N children one after the other, living up to USEC; all with this PID unless it is 0
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int truth;

static void die(const char *what)
{
    perror(what);
    _exit(70);
}

/* "<role> <PID as seen here> <nanoseconds of CLOCK_MONOTONIC>" */
static void tell(const char *role, int ns_pid)
{
    struct timespec now;
    char text[96];

    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(text, sizeof text, "%s %d %lld", role, ns_pid, now.tv_sec * 1000000000LL + now.tv_nsec);
    if (send(truth, text, (size_t)length, 0) != length)
        die("send");
}

static void stay(const char *role)
{
    tell(role, getpid());
    for (;;)
        pause();
}

static pid_t child(void)
{
    pid_t ns_pid = fork();

    if (ns_pid < 0)
        die("fork");
    if (ns_pid == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        die("prctl");
    return ns_pid;
}

static void next_pid(int ns_pid)
{
    FILE *file = fopen("/proc/sys/kernel/ns_last_pid", "w");

    if (file == NULL || fprintf(file, "%d", ns_pid - 1) < 0 || fclose(file) != 0)
        die("ns_last_pid");
}

static void *thread(void *unused)
{
    tell("thread", (int)syscall(SYS_gettid));
    for (;;)
        pause();
    return unused;
}

static void nest(void)
{
    if (child() != 0)
        return;
    if (unshare(CLONE_NEWPID) != 0)
        die("unshare");
    if (child() == 0) {
        if (child() == 0)
            stay("nested-child");
        stay("nested-init");
    }
    stay("nester");
}

static void churn(int ns_pid, int count, int most_usec)
{
    for (int i = 0; i < count; i++) {
        if (ns_pid != 0)
            next_pid(ns_pid);
        pid_t short_lived = child();
        if (short_lived == 0) {
            tell("born", getpid());
            srandom((unsigned)getpid() * 31U + (unsigned)i);
            usleep((useconds_t)(random() % (most_usec + 1)));
            _exit(0);
        }
        if (waitpid(short_lived, NULL, 0) != short_lived)
            die("waitpid");
        tell("reaped", short_lived);
    }
    tell("churned", 0);
}

static void obey(const char *line)
{
    int first = 0, count = 0, usec = 0;

    if (sscanf(line, "fork %d", &count) == 1) {
        for (int i = 0; i < count; i++)
            if (child() == 0)
                stay("child");
    } else if (sscanf(line, "as %d", &first) == 1) {
        next_pid(first);
        if (child() == 0)
            stay("as");
    } else if (strncmp(line, "thread", 6) == 0) {
        pthread_t id;
        if (pthread_create(&id, NULL, thread, NULL) != 0)
            die("pthread_create");
    } else if (strncmp(line, "nest", 4) == 0) {
        nest();
    } else if (strncmp(line, "zombie", 6) == 0) {
        if (child() == 0) {
            tell("zombie", getpid());
            _exit(0);
        }
    } else if (sscanf(line, "kill %d", &first) == 1) {
        if (kill(first, SIGKILL) != 0 || waitpid(first, NULL, 0) != first)
            die("kill");
        tell("killed", first);
    } else if (sscanf(line, "churn %d %d %d", &first, &count, &usec) == 3) {
        churn(first, count, usec);
    } else {
        die(line);
    }
}

int main(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/truth/socket"};
    char line[128];

    truth = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (truth < 0 || connect(truth, (struct sockaddr *)&address, sizeof address) != 0)
        die("/truth/socket");
    tell("main", getpid());
    while (fgets(line, sizeof line, stdin) != NULL)
        obey(line);
    return 0;
}
