/* A crowd of idle processes for the bench.
 *
 *   crowd CONTAINERS PROCESSES [DIRECTORY FILE]
 *
 * Makes CONTAINERS PID namespaces with PROCESSES processes each. With DIRECTORY, container number i also gets a
 * mount namespace in which DIRECTORY/pod-i_main is bind-mounted at /usr/local/vgpu, and every process of it maps
 * FILE in there, as a tenant of HAMi does.
 * Prints "ready", waits for its standard input to close, kills all.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

struct job {
    int number, processes, ready;
    const char *directory, *file;
};

static void die(const char *what)
{
    fprintf(stderr, "crowd: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void map_region(const struct job *job)
{
    char source[PATH_MAX];
    snprintf(source, sizeof source, "%s/pod-%d_main", job->directory, job->number);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        die("making mounts private");
    int from = open(source, O_PATH | O_DIRECTORY | O_CLOEXEC);
    snprintf(source, sizeof source, "/proc/self/fd/%d", from);
    /* A tmpfs first: the host need not have /usr/local/vgpu, and must not get one. */
    if (mount("tmpfs", "/usr/local", "tmpfs", 0, "mode=755") || mkdir("/usr/local/vgpu", 0755) ||
        mount(source, "/usr/local/vgpu", NULL, MS_BIND, NULL))
        die("bind mount at /usr/local/vgpu");
    close(from);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/usr/local/vgpu/%s", job->file);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info))
        die(path);
    if (mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED)
        die("mmap");
    close(fd);
}

static int container(void *argument)
{
    const struct job *job = argument;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);
    if (job->directory)
        map_region(job);
    for (int i = 1; i < job->processes; i++) {
        pid_t child = fork();
        if (child < 0)
            die("fork");
        if (child == 0) {
            pause();
            _exit(0);
        }
    }
    if (write(job->ready, "x", 1) != 1)
        die("write");
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    if (argc != 3 && argc != 5) {
        fprintf(stderr, "usage: crowd CONTAINERS PROCESSES [DIRECTORY FILE]\n");
        return 2;
    }
    int ready[2];
    if (pipe2(ready, O_CLOEXEC))
        die("pipe");
    struct job job = {.processes = atoi(argv[2]), .ready = ready[1]};
    if (argc == 5)
        job.directory = argv[3], job.file = argv[4];
    static char stack[256 * 1024] __attribute__((aligned(16)));
    int flags = CLONE_NEWPID | SIGCHLD | (job.directory ? CLONE_NEWNS : 0);
    for (job.number = 0; job.number < atoi(argv[1]); job.number++) {
        if (clone(container, stack + sizeof stack, flags, &job) < 0)
            die("clone into new namespaces (root is needed)");
        char byte;
        if (read(ready[0], &byte, 1) != 1)
            die("a container did not start");
    }
    puts("ready");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}
