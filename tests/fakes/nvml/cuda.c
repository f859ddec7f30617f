/*
 * A stand-in for libcuda.so.1: the calls that tests/fakes/tenant/cuda.c makes, over the GPU stand-in. The devices are
 * those of NVML_STANDIN_STATE, the driver is asked at CUDA_STANDIN_DRIVER (tests/fakes/gpu.py). A kernel takes the
 * time that its first parameter says, in cycles; the driver is told when it begins and ends.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define API __attribute__((visibility("default")))
#define KHZ 1500000
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_PTX = 218,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    SYSTEM_DRIVER_MISMATCH = 803,
    UNKNOWN = 999,
};

typedef struct {
    unsigned char bytes[16];
} CUuuid;

static const struct standin_state *state;
static __thread void *current;
static int connection = -1, device_in_use;
static unsigned long long allocated;
static uint64_t busy_us, began_us;
static char module[] = "spin";

static uint64_t now_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

static int ask(const char *request)
{
    char answer[256];
    if (send(connection, request, strlen(request), MSG_NOSIGNAL) < 0)
        return UNKNOWN;
    ssize_t n = recv(connection, answer, sizeof answer - 1, 0);
    return n == 3 && memcmp(answer, "ok\n", 3) == 0 ? SUCCESS : UNKNOWN;
}

API int cuInit(unsigned flags)
{
    const char *path = getenv("NVML_STANDIN_STATE");
    if (flags)
        return INVALID_VALUE;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return NO_DEVICE;
    void *map = mmap(NULL, sizeof *state, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED || ((const struct standin_state *)map)->version != STANDIN_VERSION)
        return SYSTEM_DRIVER_MISMATCH;
    state = map;
    return state->device_count ? SUCCESS : NO_DEVICE;
}

API int cuDeviceGetCount(int *count)
{
    if (!state)
        return NOT_INITIALIZED;
    *count = (int)state->device_count;
    return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
    if (!state)
        return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= (int)state->device_count)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API int cuDeviceGetUuid(CUuuid *uuid, int device)
{
    if (!state)
        return NOT_INITIALIZED;
    if (device < 0 || device >= (int)state->device_count)
        return INVALID_DEVICE;
    const char *text = state->devices[device].uuid + strlen("GPU-");
    for (int i = 0; i < 16; i++) {
        unsigned byte = 0;
        text += *text == '-';
        if (sscanf(text, "%2x", &byte) != 1)
            return UNKNOWN;
        uuid->bytes[i] = (unsigned char)byte;
        text += 2;
    }
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (!state)
        return NOT_INITIALIZED;
    if (device < 0 || device >= (int)state->device_count)
        return INVALID_DEVICE;
    if (attribute != 13)
        return INVALID_VALUE;
    *value = KHZ;
    return SUCCESS;
}

static int tell_memory(void)
{
    char request[256];
    snprintf(request, sizeof request, "context %s %llu\n", state->devices[device_in_use].uuid, allocated);
    return ask(request);
}

API int cuCtxCreate_v2(void **context, unsigned flags, int device)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = getenv("CUDA_STANDIN_DRIVER");
    if (!state)
        return NOT_INITIALIZED;
    if (device < 0 || device >= (int)state->device_count)
        return INVALID_DEVICE;
    if ((flags & ~0x1fu) || !path || strlen(path) >= sizeof address.sun_path)
        return INVALID_VALUE;
    strcpy(address.sun_path, path);
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) < 0)
        return UNKNOWN;
    device_in_use = device;
    *context = current = &connection;
    return tell_memory();
}

API int cuCtxSetCurrent(void *context)
{
    if (context && context != &connection)
        return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

API int cuMemAlloc_v2(unsigned long long *address, size_t size)
{
    if (!current)
        return INVALID_CONTEXT;
    if (!size)
        return INVALID_VALUE;
    if (allocated + size > state->devices[device_in_use].memory_total)
        return OUT_OF_MEMORY;
    allocated += size;
    *address = 0x7f0000000000ull;
    return tell_memory();
}

API int cuModuleLoadData(void **out, const void *image)
{
    if (!current)
        return INVALID_CONTEXT;
    if (strncmp(image, ".version ", 9) != 0 || !strstr(image, ".visible .entry spin("))
        return INVALID_PTX;
    *out = module;
    return SUCCESS;
}

API int cuModuleGetFunction(void **function, void *from, const char *name)
{
    if (from != module)
        return INVALID_VALUE;
    *function = module;
    return strcmp(name, module) == 0 ? SUCCESS : NOT_FOUND;
}

static int tell_load(int percent)
{
    char request[256];
    snprintf(request, sizeof request, "load %s %d\n", state->devices[device_in_use].uuid, percent);
    return ask(request);
}

API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *stream, void **parameters, void **extra)
{
    (void)shared, (void)stream;
    if (!current)
        return INVALID_CONTEXT;
    if (function != module || !gx || !gy || !gz || !bx || !by || !bz || !parameters || extra)
        return INVALID_VALUE;
    busy_us = *(unsigned long long *)parameters[0] / (KHZ / 1000);
    began_us = now_us();
    return tell_load(100);
}

API int cuCtxSynchronize(void)
{
    if (!current)
        return INVALID_CONTEXT;
    uint64_t now = now_us();
    if (began_us + busy_us > now)
        usleep((useconds_t)(began_us + busy_us - now));
    return tell_load(0);
}

API int cuGetErrorName(int code, const char **name)
{
    *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR";
    return SUCCESS;
}
