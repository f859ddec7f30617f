/*
 * A simulated resource manager: what NVIDIA's own libnvidia-ml.so.1 (x86-64, 470 to 550) finds below /dev/nvidia*, over
 * the state file of the GPU stand-in (../nvml/state.h, NVML_STANDIN_STATE). Commands and structures are those of the
 * open kernel modules' headers (docs/simulated-driver.md names them). What is not here answers NOT_SUPPORTED.
 *
 * NVIDIA's library is loaded with its own scope first, so that its calls of open(2) and so on arrive here (loader.c).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "../nvml/state.h"

static const struct standin_state *state;

#include "../nvml/reader.h"

#define API __attribute__((visibility("default")))
#define MAJOR 195
#define CONTROL_MINOR 255
#define MOST_FILES 4096
#define MOST_OBJECTS 65536
#define FIRST_GPU_ID 0x100u
#define MOST_GPUS 32

enum { OK = 0, GPU_IS_LOST = 0x0f, INVALID_ARGUMENT = 0x1f, NOT_SUPPORTED = 0x56 }; /* nvstatuscodes.h */

static char ours[MOST_FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* The device of each object that the library made, plus one. */
static struct {
    uint32_t handle, device;
} objects[MOST_OBJECTS];
static unsigned object_count;
static uint32_t next_handle = 0xcaf00001u;

static int ready(void)
{
    pthread_mutex_lock(&lock);
    if (!state)
        state = map_state();
    pthread_mutex_unlock(&lock);
    return state && !(state->faults & STANDIN_DRIVER_NOT_LOADED);
}

/* ---- device nodes ------------------------------------------------------------------------------------------- */

/* The minor number of a device node that the driver would have; -1 for another file. */
static int node_minor(const char *path)
{
    static const char prefix[] = "/dev/nvidia";
    if (!path || strncmp(path, prefix, sizeof prefix - 1) != 0)
        return -1;
    const char *rest = path + sizeof prefix - 1;
    if (strcmp(rest, "ctl") == 0)
        return CONTROL_MINOR;
    return *rest >= '0' && *rest <= '9' ? atoi(rest) : -1;
}

static int open_node(void)
{
    if (!ready()) {
        errno = ENOENT;
        return -1;
    }
    int fd = eventfd(0, EFD_CLOEXEC); /* poll(2) never finds an event */
    if (fd >= 0 && fd < MOST_FILES)
        ours[fd] = 1;
    return fd;
}

#define REAL(name, type)                                                                                        \
    static __typeof__(type) real;                                                                                        \
    if (!real)                                                                                                  \
        *(void **)&real = dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                                                              \
    API int name(const char *path, int flags, ...)                                                              \
    {                                                                                                           \
        REAL(#name, int (*)(const char *, int, ...));                                                           \
        va_list list;                                                                                           \
        va_start(list, flags);                                                                                  \
        mode_t mode = va_arg(list, mode_t);                                                                     \
        va_end(list);                                                                                           \
        return node_minor(path) < 0 ? real(path, flags, mode) : open_node();                                    \
    }

OPEN(open)
OPEN(open64)

API int access(const char *path, int mode)
{
    REAL("access", int (*)(const char *, int));
    return node_minor(path) < 0 ? real(path, mode) : 0;
}

#define STAT(name)                                                                                              \
    API int name(int version, const char *path, struct stat *s)                                                 \
    {                                                                                                           \
        REAL(#name, int (*)(int, const char *, struct stat *));                                                 \
        int minor_number = node_minor(path);                                                                    \
        if (minor_number < 0)                                                                                   \
            return real(version, path, s);                                                                      \
        memset(s, 0, sizeof *s);                                                                                \
        s->st_mode = S_IFCHR | 0666;                                                                            \
        s->st_rdev = makedev(MAJOR, (unsigned)minor_number);                                                    \
        return 0;                                                                                               \
    }

STAT(__xstat)
STAT(__xstat64)

API int close(int fd)
{
    REAL("close", int (*)(int));
    if (fd >= 0 && fd < MOST_FILES)
        ours[fd] = 0;
    return real(fd);
}

/* ---- objects -------------------------------------------------------------------------------------------------- */

static const struct standin_device *device_of(uint32_t handle, unsigned *index)
{
    for (unsigned i = object_count; i-- > 0;)
        if (objects[i].handle == handle && objects[i].device) {
            *index = objects[i].device - 1;
            return *index < state->device_count ? &state->devices[*index] : NULL;
        }
    return NULL;
}

/* NVOS21_PARAMETERS or NVOS64_PARAMETERS: which device an object is below. */
static void allocate(unsigned char *p, unsigned size)
{
    enum { ROOT, PARENT, NEW, CLASS };
    uint32_t *word = (void *)p, device = 0, *status = &word[size >= 48 ? 10 : 7];
    const uint32_t *parameters = *(void **)(p + 16);
    unsigned index;
    pthread_mutex_lock(&lock);
    if (!word[NEW])
        word[NEW] = next_handle++;
    if ((word[CLASS] == 0 || word[CLASS] == 0x41) && !word[ROOT])
        word[ROOT] = word[NEW];
    if (word[CLASS] == 0x80) /* NV01_DEVICE_0 */
        device = (parameters ? parameters[0] : 0) + 1;
    else if (device_of(word[PARENT], &index))
        device = index + 1;
    *status = object_count < MOST_OBJECTS ? OK : NOT_SUPPORTED;
    if (*status == OK) {
        objects[object_count].handle = word[NEW];
        objects[object_count++].device = device;
    }
    pthread_mutex_unlock(&lock);
}

/* NVOS00_PARAMETERS */
static void free_object(const unsigned char *p)
{
    const uint32_t handle = ((const uint32_t *)p)[2];
    pthread_mutex_lock(&lock);
    for (unsigned i = object_count; i-- > 0;)
        if (objects[i].handle == handle)
            objects[i] = objects[--object_count];
    pthread_mutex_unlock(&lock);
}

/* ---- the system's controls ------------------------------------------------------------------------------------ */

static uint32_t gpu_ids(uint32_t *ids)
{
    memset(ids, 0xff, MOST_GPUS * sizeof *ids);
    for (unsigned i = 0; i < state->device_count; i++)
        ids[i] = FIRST_GPU_ID + i;
    return OK;
}

static uint32_t build_version(unsigned char *p)
{
    const uint32_t size = *(uint32_t *)p;
    char *const *text = (char **)(p + 8);
    const char *const parts[] = {state->driver_version, "", "simulated"};
    for (int i = 0; i < 3; i++)
        if (text[i])
            snprintf(text[i], size, "%s", parts[i]);
    return OK;
}

static unsigned bus_of(unsigned index)
{
    return (0x3b + state->devices[index].minor) & 0xff;
}

static uint32_t system_control(uint32_t command, unsigned char *p)
{
    uint32_t *word = (void *)p, index = word[0] - FIRST_GPU_ID;
    switch (command) {
    case 0x101: /* SYSTEM_GET_BUILD_VERSION */
        return build_version(p);
    case 0x201: /* GPU_GET_ATTACHED_IDS */
        return gpu_ids(word);
    case 0x214: /* GPU_GET_PROBED_IDS: and the excluded ones */
        memset(word + MOST_GPUS, 0xff, MOST_GPUS * sizeof *word);
        return gpu_ids(word);
    case 0x202: /* GPU_GET_ID_INFO: the device's instance */
    case 0x205: /* GPU_GET_ID_INFO_V2 */
        if (index >= state->device_count)
            return INVALID_ARGUMENT;
        word[2] = index;
        word[3] = 0;
        return OK;
    case 0x21b: /* GPU_GET_PCI_INFO: domain, bus, slot */
        if (index >= state->device_count)
            return INVALID_ARGUMENT;
        word[1] = 0;
        ((uint16_t *)p)[4] = (uint16_t)bus_of(index);
        ((uint16_t *)p)[5] = 0;
        return OK;
    case 0x215: /* GPU_ATTACH_IDS: the one that failed */
        word[MOST_GPUS] = 0;
        return OK;
    case 0x203: /* GPU_GET_INIT_STATUS */
        word[1] = 0;
        return OK;
    case 0x279: /* GPU_GET_MEMOP_ENABLE and what the library asks beside it */
        word[1] = word[2] = 0;
        return OK;
    case 0x289:
    case 0x28a:
        return OK;
    default:
        return NOT_SUPPORTED;
    }
}

/* ---- a device's controls -------------------------------------------------------------------------------------- */

static uint32_t name_string(const struct standin_device *d, unsigned char *p)
{
    const uint32_t wide = *(uint32_t *)p;
    memset(p + 4, 0, 128);
    for (int i = 0; d->name[i] && i < 63; i++)
        if (wide)
            ((uint16_t *)(p + 4))[i] = (unsigned char)d->name[i];
        else
            p[4 + i] = (unsigned char)d->name[i];
    return OK;
}

/* GPU_GET_GID_INFO: the UUID, as text or as 16 bytes. */
static uint32_t gid(const struct standin_device *d, unsigned char *p)
{
    uint32_t *word = (void *)p;
    unsigned char *data = p + 12;
    if (!(word[1] & 2)) {
        word[2] = (uint32_t)snprintf((char *)data, 96, "%s", d->uuid) + 1;
        return OK;
    }
    const char *text = d->uuid + strlen("GPU-");
    for (int i = 0; i < 16; i++) {
        unsigned byte = 0;
        text += *text == '-';
        sscanf(text, "%2x", &byte);
        data[i] = (unsigned char)byte;
        text += 2;
    }
    word[2] = 16;
    return OK;
}

/* FB_GET_INFO_V2: sizes in KiB. */
static uint32_t memory_info(const struct standin_device *d, uint32_t *word)
{
    for (uint32_t i = 0; i < word[0] && i < 55; i++) {
        uint32_t *entry = word + 1 + 2 * i, total = (uint32_t)(d->memory_total >> 10);
        switch (entry[0]) {
        case 0x08: /* total RAM */
        case 0x09: /* heap */
            entry[1] = total;
            break;
        case 0x16: /* free */
            entry[1] = total - (uint32_t)(d->memory_used >> 10);
            break;
        default:
            entry[1] = 0;
        }
    }
    return OK;
}

static uint32_t host_or(const struct standin_chain *chain, int host)
{
    return host ? (uint32_t)chain->level[0].nr : translate(chain, caller_pidns());
}

static int list_is_host(void)
{
    return driver_row(state->driver_version) == 1 || sees_host(caller_pidns());
}

/* GPU_GET_PIDS: of compute contexts (by class), or of MPS clients. */
static uint32_t pids(unsigned index, uint32_t *word)
{
    uint32_t mps = word[1] == 0x900e, n = 0;
    for (uint32_t i = 0; i < state->process_count && i < STANDIN_PROCESSES; i++) {
        const struct standin_process *process = &state->processes[i];
        if (process->device == index && (process->mps != 0) == mps)
            word[3 + n++] = host_or(&process->chain, list_is_host());
    }
    word[2] = n;
    return OK;
}

/* GPU_GET_PID_INFO: memory in use; of no process where the driver compares with the other number. */
static uint32_t pid_info(unsigned index, unsigned char *p)
{
    int host = list_is_host(), blind = !host && driver_row(state->driver_version) == 2;
    for (uint32_t i = 0; i < *(uint32_t *)p && i < 200; i++) {
        unsigned char *entry = p + 8 + 72 * i;
        uint32_t *word = (void *)entry, pid = word[0];
        uint64_t *memory = (void *)(entry + 16);
        memset(memory, 0, 48);
        word[2] = OK;
        word[16] = word[17] = 0xffffffffu; /* no instance */
        for (uint32_t k = 0; k < state->process_count && !blind; k++) {
            const struct standin_process *process = &state->processes[k];
            if (process->device == index && host_or(&process->chain, host) == pid)
                memory[0] = process->memory;
        }
    }
    return OK;
}

/* ---- PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 -------------------------------------------------------------------- */

#define HEADER 16u
#define ENGINE 116u /* util in 1/100 per cent, guest's share, process, its sub-process and its name */
enum { FB, GR, NVENC, NVDEC };

struct ring_reply {
    unsigned char *samples;
    unsigned size;
    int host;
};

static uint32_t *engine_of(const struct ring_reply *reply, unsigned place, unsigned engine)
{
    return (void *)(reply->samples + place * reply->size + 8 + engine * ENGINE);
}

/* The one process of a period: the last that is noted for it. */
static void set_process(const struct standin_sample *s, unsigned place, void *data)
{
    const struct ring_reply *reply = data;
    uint32_t pid = host_or(&s->chain, reply->host);
    if (s->mem)
        engine_of(reply, place, FB)[2] = pid;
    engine_of(reply, place, GR)[2] = pid;
    if (s->enc)
        engine_of(reply, place, NVENC)[2] = pid;
    if (s->dec)
        engine_of(reply, place, NVDEC)[2] = pid;
}

static uint32_t utilization(unsigned index, unsigned char *p, uint32_t size)
{
    struct period ring[RING];
    uint32_t *word = (void *)p;
    struct ring_reply reply = {p + HEADER, (size - HEADER) / RING, 0};
    unsigned engines = (reply.size - 8) / ENGINE, oldest = 0;
    reply.host = driver_row(state->driver_version) < 4 || sees_host(caller_pidns());
    uint64_t seq;
    do {
        seq = read_begin();
        memset(reply.samples, 0, RING * reply.size);
        for (unsigned place = 0; place < RING; place++)
            for (unsigned engine = 0; engine < engines; engine++)
                engine_of(&reply, place, engine)[2] = 0xffffffffu;
        read_ring(index, ring, set_process, &reply);
    } while (read_retry(seq));
    for (unsigned place = 0; place < RING; place++) {
        const struct period *period = &ring[place];
        const unsigned loads[] = {period->mem, period->sm, period->enc, period->dec};
        *(uint64_t *)(reply.samples + place * reply.size) = period->time_us * 1000;
        for (unsigned engine = 0; engine < engines && engine < 4; engine++)
            engine_of(&reply, place, engine)[0] = loads[engine] * 100;
        if (period->time_us && period->time_us < ring[oldest].time_us)
            oldest = place;
    }
    word[2] = RING;
    word[3] = oldest; /* the next to be written */
    return OK;
}

static uint32_t clocks(unsigned char *p)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    /* The same microsecond: from less the library would find that one of the clocks is faster. */
    const uint64_t us = (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
    for (int i = 0; i < 16; i++) {
        ((uint64_t *)(p + 8))[2 * i] = us;
        ((uint64_t *)(p + 8))[2 * i + 1] = us * 1000;
    }
    return OK;
}

static uint32_t device_control(uint32_t command, unsigned index, const struct standin_device *d, unsigned char *p,
                               uint32_t size)
{
    uint32_t *word = (void *)p;
    if (d->lost)
        return GPU_IS_LOST;
    switch (command) {
    case 0x800289: /* GPU_GET_VIRTUALIZATION_MODE: none, or a guest's (VGX) */
        word[0] = state->faults & STANDIN_VGPU ? 2 : 0;
        return OK;
    case 0x800294: /* GPU_GET_BRAND_CAPS */
        word[0] = 0;
        return OK;
    case 0x80028e: /* GPU_GET_VGPU_HETEROGENEOUS_MODE */
        p[0] = 0;
        return OK;
    case 0x800292: /* GPU_GET_CLASSLIST_V2: GR, compute */
        word[0] = 3;
        word[1] = 0xc6c0;
        word[2] = 0x2080;
        word[3] = 0xc697;
        return OK;
    case 0x20800102: /* GPU_GET_INFO_V2 */
        for (uint32_t i = 0; i < word[0]; i++)
            if (word[1 + 2 * i] == 0x2a) /* MIG: unsupported 0, on 1, off 2 */
                word[2 + 2 * i] = d->errors[STANDIN_MIG_MODE] ? 0 : 2 - d->mig_enabled;
            else
                word[2 + 2 * i] = 0;
        return OK;
    case 0x20800110: /* GPU_GET_NAME_STRING */
        return name_string(d, p);
    case 0x2080014a: /* GPU_GET_GID_INFO */
        return gid(d, p);
    case 0x2080018d: /* GPU_GET_PIDS */
        return pids(index, word);
    case 0x2080018e: /* GPU_GET_PID_INFO */
        return pid_info(index, p);
    case 0x20800301: /* EVENT_SET_NOTIFICATION: none comes */
        return OK;
    case 0x20800406: /* TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO */
        return clocks(p);
    case 0x20801303: /* FB_GET_INFO_V2 */
        return memory_info(d, word);
    case 0x20801701: /* MC_GET_ARCH_INFO: GA100 */
        word[0] = 0x170;
        word[1] = 0;
        word[2] = 0xa1;
        return OK;
    case 0x20801801: /* BUS_GET_PCI_INFO */
        word[0] = 0x20b010de;
        word[1] = 0x134f10de;
        word[2] = 0xa1;
        word[3] = 0x20b0;
        return OK;
    case 0x20802096: /* PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 */
        if (d->mig_enabled || (state->faults & STANDIN_PROCESS_UTILIZATION_UNSUPPORTED))
            return NOT_SUPPORTED;
        return utilization(index, p, size);
    default:
        return NOT_SUPPORTED;
    }
}

/* ---- ioctl(2) ------------------------------------------------------------------------------------------------- */

/* NVOS54_PARAMETERS */
struct control {
    uint32_t client, object, command, flags;
    uint64_t parameters;
    uint32_t size, status;
};

static void control(struct control *c)
{
    unsigned char *p = (void *)(uintptr_t)c->parameters;
    unsigned index = 0;
    const struct standin_device *d = device_of(c->object, &index);
    c->status = c->command < 0x10000 ? system_control(c->command, p)
                : d                  ? device_control(c->command, index, d, p, c->size)
                                     : NOT_SUPPORTED;
    if (getenv("RM_TRACE"))
        fprintf(stderr, "control %08x of %08x, %u bytes: %x\n", c->command, c->object, c->size, c->status);
}

/* NV_ESC_CARD_INFO: nv_ioctl_card_info_t for each device. */
static void cards(unsigned char *p, unsigned size)
{
    enum { CARD = 72 };
    memset(p, 0, size);
    for (unsigned i = 0; i < state->device_count && (i + 1) * CARD <= size; i++, p += CARD) {
        p[0] = 1;
        p[8] = (unsigned char)bus_of(i);
        *(uint16_t *)(p + 12) = 0x10de;
        *(uint16_t *)(p + 14) = 0x20b0;
        *(uint32_t *)(p + 16) = FIRST_GPU_ID + i;
        *(uint32_t *)(p + 56) = state->devices[i].minor;
    }
}

API int ioctl(int fd, unsigned long request, ...)
{
    REAL("ioctl", int (*)(int, unsigned long, ...));
    va_list list;
    va_start(list, request);
    unsigned char *p = va_arg(list, void *);
    va_end(list);
    if (fd < 0 || fd >= MOST_FILES || !ours[fd])
        return real(fd, request, p);
    const unsigned size = (request >> 16) & 0x3fff;
    if (!ready()) {
        errno = ENODEV;
        return -1;
    }
    switch (request & 0xff) {
    case 0x29: /* NV_ESC_RM_FREE */
        free_object(p);
        break;
    case 0x2a: /* NV_ESC_RM_CONTROL */
        control((void *)p);
        break;
    case 0x2b: /* NV_ESC_RM_ALLOC */
        allocate(p, size);
        break;
    case 0xc8: /* NV_ESC_CARD_INFO */
        cards(p, size);
        break;
    case 0xd2: /* NV_ESC_CHECK_VERSION_STR: the library's against the module's */
        ((uint32_t *)p)[1] = strncmp((char *)p + 8, state->driver_version, 64) == 0;
        break;
    }
    return 0;
}
