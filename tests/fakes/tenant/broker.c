#define _GNU_SOURCE
#include "broker.h"

#include <arpa/inet.h>
#include <libgen.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

struct request {
    char magic[4];
    uint16_t version, command;
};

struct answer {
    char magic[4];
    uint16_t version, status;
    uint32_t host_pid;
};

_Static_assert(sizeof(struct request) == 8 && sizeof(struct answer) == 12, "as on the wire");

/* Root's directory, which nobody else can write to and which is mounted read-only, with root's socket in it. */
static int may_be_believed(const char *path)
{
    char copy[sizeof ((struct sockaddr_un *)0)->sun_path];
    struct stat directory, node;
    struct statvfs mount;
    if (strlen(path) >= sizeof copy)
        return 0;
    strcpy(copy, path);
    const char *name = dirname(copy);
    return lstat(name, &directory) == 0 && S_ISDIR(directory.st_mode) && directory.st_uid == 0 &&
           !(directory.st_mode & (S_IWGRP | S_IWOTH)) && statvfs(name, &mount) == 0 && (mount.f_flag & ST_RDONLY) &&
           lstat(path, &node) == 0 && S_ISSOCK(node.st_mode) && node.st_uid == 0;
}

static int exchange(int fd)
{
    struct request request = {{'H', 'P', 'I', 'D'}, htons(1), htons(1)};
    struct answer answer;
    struct ucred server;
    socklen_t size = sizeof server;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &server, &size) < 0 || server.uid != 0)
        return 0;
    if (send(fd, &request, sizeof request, MSG_NOSIGNAL) != sizeof request)
        return 0;
    if (recv(fd, &answer, sizeof answer, MSG_WAITALL) != sizeof answer)
        return 0;
    if (memcmp(answer.magic, request.magic, 4) != 0 || ntohs(answer.version) != 1 || ntohs(answer.status) != 0)
        return 0;
    return (int)ntohl(answer.host_pid);
}

int broker_number(const char *path)
{
    const char *wanted = getenv("LIBVGPU_HOSTPID_BROKER");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = 5};
    int number = 0;
    if (!wanted || strcmp(wanted, "1") != 0)
        return 0;
    if (!may_be_believed(path)) {
        fprintf(stderr, "tenant: the broker at %s is not to be believed\n", path);
        return 0;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        number = exchange(fd);
    close(fd);
    return number;
}
