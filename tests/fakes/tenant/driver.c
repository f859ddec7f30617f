#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cuda.h"

static int connection = -1;
static int real; /* a GPU and its own library, instead of a connection */

/* CUDA starts threads of its own before the first context exists; some drivers list one of them. */
static void *driver_thread(void *unused)
{
    (void)unused;
    for (;;)
        pause();
    return NULL;
}

int driver_connect(const char *socket_path)
{
    pthread_t thread;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strcmp(socket_path, "cuda") == 0) {
        real = 1;
        return cuda_open();
    }
    if (strlen(socket_path) >= sizeof address.sun_path) {
        fprintf(stderr, "tenant: the driver socket's path is longer than a socket path can be: %s\n", socket_path);
        return -1;
    }
    strcpy(address.sun_path, socket_path);
    if (pthread_create(&thread, NULL, driver_thread, NULL) != 0)
        return -1;
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) < 0) {
        fprintf(stderr, "tenant: cannot reach the driver at %s: %s\n", socket_path, strerror(errno));
        return -1;
    }
    return 0;
}

void driver_forget(void)
{
    if (connection >= 0)
        close(connection);
    connection = -1;
}

static int ask(const char *request)
{
    char answer[256];
    ssize_t n = -1;
    if (connection < 0)
        return 0; /* a tenant without a GPU, for tests of the cache alone */
    if (send(connection, request, strlen(request), MSG_NOSIGNAL) == (ssize_t)strlen(request))
        n = recv(connection, answer, sizeof answer - 1, 0);
    if (n <= 0) {
        fprintf(stderr, "tenant: the driver has gone\n");
        return -1;
    }
    answer[n] = 0;
    if (strcmp(answer, "ok\n") == 0)
        return 0;
    fprintf(stderr, "tenant: the driver refused: %s", answer);
    return -1;
}

int driver_context(const char *uuid, uint64_t memory)
{
    char request[256];
    if (real)
        return cuda_context(uuid, memory);
    snprintf(request, sizeof request, "context %s %llu\n", uuid, (unsigned long long)memory);
    return ask(request);
}

int driver_load(const char *uuid, int sm)
{
    char request[256];
    if (real)
        return cuda_load(sm);
    snprintf(request, sizeof request, "load %s %d\n", uuid, sm);
    return ask(request);
}

/* ---- NVML ---------------------------------------------------------------------------------------------------- */

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

struct process_v1 {
    unsigned pid;
    unsigned long long memory;
};
struct process_v3 {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};
struct sample {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, mem, enc, dec;
};
/* Of nvmlDeviceGetProcessesUtilizationInfo. */
struct use {
    unsigned long long time_us;
    unsigned pid, sm, mem, enc, dec, jpg, ofa;
};
struct uses {
    unsigned version, count;
    unsigned long long since_us;
    struct use *uses;
};

static struct {
    int (*init)(void);
    int (*by_uuid)(const char *, void **);
    int (*list_v1)(void *, unsigned *, struct process_v1 *);
    int (*list_v3)(void *, unsigned *, struct process_v3 *);
    int (*samples)(void *, struct sample *, unsigned *, unsigned long long);
    int (*uses)(void *, struct uses *);
} nvml;

int nvml_open(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "tenant: %s\n", dlerror());
        return -1;
    }
    *(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
    *(void **)&nvml.by_uuid = dlsym(library, "nvmlDeviceGetHandleByUUID");
    *(void **)&nvml.list_v1 = dlsym(library, "nvmlDeviceGetComputeRunningProcesses");
    *(void **)&nvml.list_v3 = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    *(void **)&nvml.samples = dlsym(library, "nvmlDeviceGetProcessUtilization");
    *(void **)&nvml.uses = dlsym(library, "nvmlDeviceGetProcessesUtilizationInfo");
    if (!nvml.init || !nvml.by_uuid || !nvml.list_v1 || !nvml.samples) {
        fprintf(stderr, "tenant: libnvidia-ml.so.1 lacks a function that every driver has\n");
        return -1;
    }
    int ret = nvml.init();
    if (ret != SUCCESS)
        fprintf(stderr, "tenant: nvmlInit failed with %d\n", ret);
    return ret == SUCCESS ? 0 : -1;
}

int nvml_list(const char *uuid, struct listed *out)
{
    static __thread struct process_v3 v3[LIST_MAX];
    static __thread struct process_v1 v1[LIST_MAX];
    void *device;
    unsigned n = LIST_MAX;
    if (nvml.by_uuid(uuid, &device) != SUCCESS)
        return -1;
    int ret = nvml.list_v3 ? nvml.list_v3(device, &n, v3) : nvml.list_v1(device, &n, v1);
    if (ret != SUCCESS)
        return -1;
    for (unsigned i = 0; i < n; i++)
        out[i] = nvml.list_v3 ? (struct listed){v3[i].pid, v3[i].memory} : (struct listed){v1[i].pid, v1[i].memory};
    return (int)n;
}

/* As HAMi-core since PR 218, where the older call is refused. */
static int second_call(void *device, uint64_t since_us, struct sampled *out)
{
    static __thread struct use uses[LIST_MAX];
    struct uses all = {sizeof all | 1u << 24, LIST_MAX, since_us, uses};
    int ret = nvml.uses(device, &all);
    if (ret != SUCCESS)
        return ret == NOT_FOUND ? 0 : -1;
    for (unsigned i = 0; i < all.count; i++)
        out[i] = (struct sampled){uses[i].pid, uses[i].sm};
    return (int)all.count;
}

int nvml_samples(const char *uuid, uint64_t since_us, int newer, struct sampled *out)
{
    static __thread struct sample samples[LIST_MAX];
    void *device;
    unsigned n = LIST_MAX;
    if (nvml.by_uuid(uuid, &device) != SUCCESS)
        return -1;
    int ret = nvml.samples(device, samples, &n, since_us);
    if (ret == NOT_SUPPORTED && newer && nvml.uses)
        return second_call(device, since_us, out);
    if (ret != SUCCESS)
        return ret == NOT_FOUND ? 0 : -1;
    for (unsigned i = 0; i < n; i++)
        out[i] = (struct sampled){samples[i].pid, samples[i].sm};
    return (int)n;
}
