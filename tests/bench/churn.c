/* Steady starts of one program in a container, each of which ends after a while.
 *
 *   churn RATE LIFE_MS SOCKET PROGRAM ARGUMENT ...
 *
 * Each new process sends its PID as it knows it to the datagram socket, where the kernel adds the host PID, and becomes
 * the program. Three in four are asked to end, every fourth is killed. A tick that comes late makes up for what is
 * missing. It ends when its standard input does.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void become(char **argv, int input)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    pid_t own = getpid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    strncpy(address.sun_path, argv[3], sizeof address.sun_path - 1);
    int told = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0), silent = open("/dev/null", O_WRONLY);
    if (told < 0 || silent < 0 || sendto(told, &own, sizeof own, 0, (struct sockaddr *)&address, sizeof address) < 0)
        _exit(1);
    dup2(input, STDIN_FILENO);
    dup2(silent, STDOUT_FILENO);
    dup2(silent, STDERR_FILENO);
    execv(argv[4], argv + 4);
    _exit(1);
}

int main(int argc, char **argv)
{
    static struct { pid_t pid; double until; } living[MOST];
    int held[2];
    if (argc < 5 || pipe2(held, O_CLOEXEC) < 0)
        return 2;
    signal(SIGCHLD, SIG_IGN); /* the kernel reaps them */
    double rate = atof(argv[1]), life = atof(argv[2]) / 1e3, began = now();
    long made = 0, ended = 0;
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    while (poll(&input, 1, 5) == 0) {
        for (; ended < made && living[ended % MOST].until <= now(); ended++)
            kill(living[ended % MOST].pid, ended % 4 ? SIGTERM : SIGKILL);
        for (long due = (long)((now() - began) * rate); made < due && made - ended < MOST; made++) {
            pid_t child = fork();
            if (child < 0)
                return 1;
            if (child == 0)
                become(argv, held[0]);
            living[made % MOST].pid = child;
            living[made % MOST].until = now() + life;
        }
    }
    return 0;
}
