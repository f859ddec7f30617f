/* A steady storm of short processes for the bench.
 *
 *   storm RATE SECONDS
 *
 * Forks RATE children a second in a PID namespace of its own, each of which ends at once. Prints how many it made
 * and how many seconds that took. A tick that comes late makes up for what is missing, so the rate holds on average.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS 1000000L

static void die(const char *what)
{
    fprintf(stderr, "storm: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int storm(void *argument)
{
    char **argv = argument;
    double rate = atof(argv[1]), seconds = atof(argv[2]), began = now(), elapsed = 0;
    long made = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN); /* the kernel reaps them */
    while ((elapsed = now() - began) < seconds) {
        for (long due = (long)(elapsed * rate); made < due && now() - began < seconds; made++) {
            pid_t child = fork();
            if (child < 0)
                die("fork");
            if (child == 0)
                _exit(0);
        }
        struct timespec tick = {.tv_nsec = TICK_NS};
        nanosleep(&tick, NULL);
    }
    while (wait(NULL) > 0 || errno == EINTR)
        ;
    printf("%ld %.3f\n", made, elapsed);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    static char stack[256 * 1024] __attribute__((aligned(16)));
    if (argc != 3) {
        fprintf(stderr, "usage: storm RATE SECONDS\n");
        return 2;
    }
    pid_t child = clone(storm, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, argv);
    if (child < 0)
        die("clone into a new PID namespace (root is needed)");
    int status;
    if (waitpid(child, &status, 0) < 0)
        die("waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
