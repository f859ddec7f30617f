#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PERIOD_MS 10 /* a change of the load takes as long at most */
#define CLOCK_RATE 13   /* CU_DEVICE_ATTRIBUTE_CLOCK_RATE, in kHz */
#define BLOCKING_SYNC 4 /* CU_CTX_SCHED_BLOCKING_SYNC: waiting for the GPU takes no CPU */

typedef struct {
    unsigned char bytes[16];
} uuid_bytes;

/* One thread that turns around until so many cycles have passed. The driver compiles it for its own GPU; a driver
 * that has forgotten the oldest of these generations takes a younger one. */
#define KERNEL(target)                                                                                          \
    ".version 6.3\n.target " target "\n.address_size 64\n"                                                      \
    ".visible .entry spin(.param .u64 cycles)\n{\n"                                                             \
    "  .reg .pred %p;\n  .reg .u64 %begin, %now, %most;\n"                                                      \
    "  ld.param.u64 %most, [cycles];\n  mov.u64 %begin, %clock64;\n"                                            \
    "again:\n  mov.u64 %now, %clock64;\n  sub.u64 %now, %now, %begin;\n"                                        \
    "  setp.lt.u64 %p, %now, %most;\n  @%p bra again;\n  ret;\n}\n"

static const char *const kernels[] = {KERNEL("sm_50"), KERNEL("sm_61"), KERNEL("sm_75")};

static struct {
    int (*init)(unsigned);
    int (*count)(int *);
    int (*get)(int *, int);
    int (*uuid)(uuid_bytes *, int);
    int (*attribute)(int *, int, int);
    int (*context)(void **, unsigned, int);
    int (*current)(void *);
    int (*alloc)(unsigned long long *, size_t);
    int (*module)(void **, const void *);
    int (*function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*wait)(void);
    int (*name)(int, const char **);
} cu;

static void *context, *spin;
static int khz;
static _Atomic int percent;
static _Atomic long long busy_us;

static int failed(const char *what, int code)
{
    const char *name = "unknown error";
    if (code && cu.name)
        cu.name(code, &name);
    fprintf(stderr, "tenant: CUDA cannot %s: %s (%d)\n", what, name, code);
    return -1;
}

int cuda_open(void)
{
    static const struct {
        const char *name;
        void *place;
    } wanted[] = {
        {"cuInit", &cu.init},
        {"cuDeviceGetCount", &cu.count},
        {"cuDeviceGet", &cu.get},
        {"cuDeviceGetUuid", &cu.uuid},
        {"cuDeviceGetAttribute", &cu.attribute},
        {"cuCtxCreate_v2", &cu.context},
        {"cuCtxSetCurrent", &cu.current},
        {"cuMemAlloc_v2", &cu.alloc},
        {"cuModuleLoadData", &cu.module},
        {"cuModuleGetFunction", &cu.function},
        {"cuLaunchKernel", &cu.launch},
        {"cuCtxSynchronize", &cu.wait},
        {"cuGetErrorName", &cu.name},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "tenant: %s\n", dlerror());
        return -1;
    }
    for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *symbol = dlsym(library, wanted[i].name);
        if (!symbol && wanted[i].place == (void *)&cu.uuid)
            symbol = dlsym(library, "cuDeviceGetUuid_v2"); /* the same, but for an instance of MIG */
        if (!symbol) {
            fprintf(stderr, "tenant: libcuda.so.1 has no %s\n", wanted[i].name);
            return -1;
        }
        memcpy(wanted[i].place, &symbol, sizeof symbol);
    }
    int ret = cu.init(0);
    return ret ? failed("start", ret) : 0;
}

/* NVML's name of a device, from CUDA's bytes. */
static void uuid_text(const uuid_bytes *uuid, char *text)
{
    text += sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid->bytes[i]);
}

static int find(const char *wanted)
{
    int count = 0, device;
    cu.count(&count);
    for (int i = 0; i < count; i++) {
        uuid_bytes uuid;
        char text[64];
        if (cu.get(&device, i) || cu.uuid(&uuid, device))
            continue;
        uuid_text(&uuid, text);
        if (strcmp(text, wanted) == 0)
            return device;
    }
    fprintf(stderr, "tenant: none of the %d devices that CUDA shows is %s\n", count, wanted);
    return -1;
}

static long long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

long long cuda_busy_us(void)
{
    return atomic_load(&busy_us);
}

static void *work(void *unused)
{
    (void)unused;
    cu.current(context);
    for (;;) {
        int share = atomic_load(&percent);
        unsigned long long cycles = (unsigned long long)khz * PERIOD_MS * (unsigned)share / 100;
        void *parameters[] = {&cycles};
        int ret = share ? cu.launch(spin, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) : 0;
        long long began = now_us(); /* a launch that waited for a CPU has used no GPU yet */
        if (!ret && share)
            ret = cu.wait();
        if (share)
            atomic_fetch_add(&busy_us, now_us() - began);
        if (ret) {
            failed("run a kernel", ret);
            _exit(5);
        }
        usleep((useconds_t)(PERIOD_MS * (100 - share) * 10));
    }
    return NULL;
}

int cuda_context(const char *uuid, uint64_t memory)
{
    pthread_t thread;
    unsigned long long address;
    void *module = NULL;
    int device = find(uuid), ret;
    if (device < 0)
        return -1;
    if (context) {
        fprintf(stderr, "tenant: a second device of CUDA's in one process is more than this program can\n");
        return -1;
    }
    if ((ret = cu.attribute(&khz, CLOCK_RATE, device)) || khz <= 0)
        return failed("tell the clock rate", ret);
    if ((ret = cu.context(&context, BLOCKING_SYNC, device)))
        return failed("make a context", ret);
    if (memory && (ret = cu.alloc(&address, memory)))
        return failed("allocate memory", ret);
    for (unsigned i = 0; i < sizeof kernels / sizeof *kernels && !module; i++)
        ret = cu.module(&module, kernels[i]);
    if (!module)
        return failed("load the kernel", ret);
    if ((ret = cu.function(&spin, module, "spin")))
        return failed("find the kernel", ret);
    return pthread_create(&thread, NULL, work, NULL) ? failed("start a thread", 0) : 0;
}

int cuda_load(int sm)
{
    atomic_store(&percent, sm < 0 ? 0 : sm > 100 ? 100 : sm);
    return 0;
}
