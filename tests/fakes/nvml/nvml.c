/*
 * A stand-in for libnvidia-ml.so.1: NVML's ABI over a state file (state.h) named by NVML_STANDIN_STATE.
 *
 * Which PIDs a caller sees follows the driver version in the state, as measured on real drivers:
 *
 *   driver                      compute process list         utilization samples
 *   up to 535.104.05            host                         host
 *   535.113.01 to 560.35.03     container, memory reads 0    host
 *   565.57.01 to 565.77         container                    host
 *   570.86.15 and later         container                    container
 *
 * A caller in the initial PID namespace, or in the one the driver runs in, always sees host PIDs. Where PIDs
 * are translated, a process that has none in the caller's namespace keeps its host number.
 *
 * NVML_SINCE (550, 510 or 470) is the oldest driver this build belongs to; newer symbols are left out, so that
 * a caller meets the same missing symbols as on a real node.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

static const struct standin_state *state; /* mapped by the first init, unmapped never: threads may still read */

#include "reader.h"

#ifndef NVML_SINCE
#define NVML_SINCE 550
#endif
#define API __attribute__((visibility("default")))

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct standin_handle *nvmlDevice_t;
struct standin_handle {
    unsigned index;
    int mig; /* index among the device's instances, NO_MIG for the device itself */
};
#define NO_MIG (-1)

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long timeStamp;
    unsigned int pid;
    unsigned int smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
    unsigned int version;
    unsigned int processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

#define MEMORY_V2 ((unsigned)(sizeof(nvmlMemory_v2_t) | (2u << 24)))
#define PROCESSES_UTILIZATION_V1 ((unsigned)(sizeof(nvmlProcessesUtilizationInfo_v1_t) | (1u << 24)))
#define MAX_ROWS (STANDIN_PROCESSES + 64)

_Static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "nvmlProcessInfo_v1_t");
_Static_assert(sizeof(nvmlProcessInfo_v2_t) == 24, "nvmlProcessInfo_v2_t");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "nvmlProcessUtilizationSample_t");
_Static_assert(sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "nvmlProcessUtilizationInfo_v1_t");
_Static_assert(PROCESSES_UTILIZATION_V1 == 0x01000018u, "nvmlProcessesUtilizationInfo_v1");
_Static_assert(MEMORY_V2 == 0x02000028u, "nvmlMemory_v2");

/* A process or a sample as the caller will see it. */
struct row {
    unsigned host_pid; /* identity while collecting; never handed out untranslated by accident */
    unsigned pid, place;
    unsigned long long time_us, memory;
    unsigned sm, mem, enc, dec;
};

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int init_count;
static struct standin_handle handles[STANDIN_DEVICES];
static struct standin_handle mig_handles[STANDIN_DEVICES][STANDIN_MIGS];
static _Atomic unsigned grown;

static void hang_while(unsigned call)
{
    while (__atomic_load_n(&state->hang, __ATOMIC_ACQUIRE) & call)
        usleep(20000);
}

/* ---- collecting rows ------------------------------------------------------------------------------------- */

static unsigned add_faulty_rows(struct row *rows, unsigned n, uint64_t now_us)
{
    if ((state->faults & STANDIN_PID_ZERO) && n < MAX_ROWS)
        rows[n++] = (struct row){.pid = 0, .time_us = now_us, .memory = 1 << 20, .sm = 3};
    unsigned extra = state->grow ? atomic_load(&grown) : 0;
    for (unsigned i = 0; i < extra && n < MAX_ROWS; i++) /* numbers no kernel gives out */
        rows[n++] = (struct row){.pid = 0x7ffffff0u - i, .time_us = now_us, .memory = 1 << 20, .sm = 1};
    return n;
}

static uint64_t wall_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

static unsigned collect_processes(unsigned device, int mps, struct row *rows)
{
    unsigned pidns = caller_pidns(), n;
    uint64_t seq;
    do {
        seq = read_begin();
        n = 0;
        int row = driver_row(state->driver_version);
        int host = row == 1 || sees_host(pidns);
        for (unsigned i = 0; i < state->process_count && i < STANDIN_PROCESSES; i++) {
            const struct standin_process *p = &state->processes[i];
            if (p->device != device || (p->mps != 0) != mps)
                continue;
            rows[n].host_pid = (unsigned)p->chain.level[0].nr;
            rows[n].pid = host ? rows[n].host_pid : translate(&p->chain, pidns);
            rows[n].memory = !host && row == 2 ? 0 : p->memory;
            n++;
        }
        if (!mps)
            n = add_faulty_rows(rows, n, 0);
    } while (read_retry(seq));
    return n;
}

struct collected {
    struct row *rows;
    unsigned n, pidns;
    uint64_t since_us;
    int host;
};

/* Adds a process's part of one period. Its stamp is that of its last period in the order of the ring's places. */
static void add_part(const struct standin_sample *s, unsigned place, void *data)
{
    struct collected *c = data;
    unsigned host_pid = (unsigned)s->chain.level[0].nr, i = 0;
    if (s->time_us <= c->since_us || place == UNSEEN)
        return;
    while (i < c->n && c->rows[i].host_pid != host_pid)
        i++;
    if (i == STANDIN_PROCESSES)
        return;
    struct row *row = &c->rows[i];
    if (i == c->n) {
        *row = (struct row){.host_pid = host_pid, .pid = c->host ? host_pid : translate(&s->chain, c->pidns)};
        c->n++;
    }
    if (place >= row->place) {
        row->place = place;
        row->time_us = s->time_us;
    }
    row->sm += s->sm;
    row->mem += s->mem;
    row->enc += s->enc;
    row->dec += s->dec;
}

/* The processes with a period after `since_us`; the values are their parts over the periods with any process, rounded
 * up. */
static unsigned collect_samples(unsigned device, uint64_t since_us, struct row *rows)
{
    struct period ring[RING];
    struct collected c;
    unsigned active;
    uint64_t seq;
    do {
        seq = read_begin();
        c = (struct collected){.rows = rows, .pidns = caller_pidns(), .since_us = since_us};
        c.host = driver_row(state->driver_version) < 4 || state->faults & STANDIN_VGPU || sees_host(c.pidns);
        read_ring(device, ring, add_part, &c);
    } while (read_retry(seq));
    active = 0;
    for (unsigned i = UNSEEN + 1; i < RING; i++)
        active += ring[i].time_us > since_us && ring[i].busy;
    for (unsigned i = 0; i < c.n; i++) {
        rows[i].sm = (rows[i].sm + active - 1) / active;
        rows[i].mem = (rows[i].mem + active - 1) / active;
        rows[i].enc = (rows[i].enc + active - 1) / active;
        rows[i].dec = (rows[i].dec + active - 1) / active;
    }
    return add_faulty_rows(rows, c.n, wall_us());
}

/* A fetch after which the list has grown, as often as the fault says. */
static unsigned grow_before_fetch(unsigned n)
{
    unsigned limit = __atomic_load_n(&state->grow, __ATOMIC_ACQUIRE);
    if (!limit)
        atomic_store(&grown, 0);
    else if (atomic_load(&grown) < limit) {
        atomic_fetch_add(&grown, 1);
        return n + 1;
    }
    return n;
}

/* ---- checks that every call starts with ------------------------------------------------------------------ */

static nvmlReturn_t ready(enum standin_answer call)
{
    if (!atomic_load(&init_count))
        return NVML_ERROR_UNINITIALIZED;
    if (call == STANDIN_UTILIZATION || call == STANDIN_PERIODS)
        hang_while(STANDIN_HANG_UTILIZATION);
    if (state->faults & STANDIN_DRIVER_NOT_LOADED)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    return (nvmlReturn_t)__atomic_load_n(&state->errors[call], __ATOMIC_ACQUIRE);
}

/* What a call on this device answers before it even looks. */
static nvmlReturn_t device_error(unsigned index, enum standin_answer call)
{
    const struct standin_device *d = &state->devices[index];
    if (d->lost)
        return NVML_ERROR_GPU_IS_LOST;
    unsigned any = call == STANDIN_HANDLE ? 0 : __atomic_load_n(&d->errors[STANDIN_ANY], __ATOMIC_ACQUIRE);
    return (nvmlReturn_t)(any ? any : __atomic_load_n(&d->errors[call], __ATOMIC_ACQUIRE));
}

static int is_handle(nvmlDevice_t device)
{
    return (device >= handles && device < handles + STANDIN_DEVICES) ||
           (device >= &mig_handles[0][0] && device < &mig_handles[0][0] + STANDIN_DEVICES * STANDIN_MIGS);
}

static nvmlReturn_t ready_device(nvmlDevice_t device, enum standin_answer call)
{
    nvmlReturn_t ret = ready(call);
    if (ret == NVML_SUCCESS && call != STANDIN_HANDLE)
        ret = (nvmlReturn_t)__atomic_load_n(&state->errors[STANDIN_ANY], __ATOMIC_ACQUIRE);
    if (ret != NVML_SUCCESS)
        return ret;
    if (!is_handle(device) || device->index >= state->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return device_error(device->index, call);
}

static nvmlReturn_t give_text(const char *text, char *out, unsigned length)
{
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

#define DEVICE_CALL(device, call, argument)                                                                     \
    do {                                                                                                        \
        nvmlReturn_t ret_ = ready_device(device, call);                                                         \
        if (ret_ != NVML_SUCCESS)                                                                               \
            return ret_;                                                                                        \
        if (!(argument))                                                                                        \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                 \
    } while (0)

/* A call that knows whole devices only. */
#define WHOLE_DEVICE_CALL(device, call, argument)                                                               \
    do {                                                                                                        \
        DEVICE_CALL(device, call, argument);                                                                    \
        if ((device)->mig != NO_MIG)                                                                            \
            return NVML_ERROR_NOT_SUPPORTED;                                                                    \
    } while (0)

#define SYSTEM_CALL(call, argument)                                                                             \
    do {                                                                                                        \
        nvmlReturn_t ret_ = ready(call);                                                                        \
        if (ret_ != NVML_SUCCESS)                                                                               \
            return ret_;                                                                                        \
        if (!(argument))                                                                                        \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                 \
    } while (0)

/* ---- the library ------------------------------------------------------------------------------------------ */

API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    nvmlReturn_t ret = NVML_SUCCESS;
    pthread_mutex_lock(&init_lock);
    if (!state || !init_count) {
        const struct standin_state *fresh = map_state();
        if (!fresh)
            ret = NVML_ERROR_DRIVER_NOT_LOADED;
        else
            state = fresh;
    }
    pthread_mutex_unlock(&init_lock);
    if (ret != NVML_SUCCESS)
        return ret;
    hang_while(STANDIN_HANG_INIT);
    if (state->faults & STANDIN_DRIVER_NOT_LOADED)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (version_number(state->driver_version) < NVML_SINCE * 1000000ul)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    if (state->errors[STANDIN_INIT])
        return (nvmlReturn_t)state->errors[STANDIN_INIT];
    pthread_mutex_lock(&init_lock);
    for (unsigned i = 0; i < STANDIN_DEVICES; i++) {
        handles[i] = (struct standin_handle){i, NO_MIG};
        for (int m = 0; m < STANDIN_MIGS; m++)
            mig_handles[i][m] = (struct standin_handle){i, m};
    }
    init_count++;
    pthread_mutex_unlock(&init_lock);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlShutdown(void)
{
    if (!atomic_load(&init_count))
        return NVML_ERROR_UNINITIALIZED;
    pthread_mutex_lock(&init_lock);
    nvmlReturn_t ret = init_count > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (ret == NVML_SUCCESS)
        init_count--;
    pthread_mutex_unlock(&init_lock);
    return ret;
}

API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const text[] = {
        [0] = "Success",
        [1] = "Uninitialized",
        [2] = "Invalid Argument",
        [3] = "Not Supported",
        [4] = "Insufficient Permissions",
        [5] = "Already Initialized",
        [6] = "Not Found",
        [7] = "Insufficient Size",
        [8] = "Insufficient External Power",
        [9] = "Driver Not Loaded",
        [10] = "Timeout",
        [11] = "Interrupt Request Issue",
        [12] = "NVML Shared Library Not Found",
        [13] = "Function Not Found",
        [14] = "Corrupted infoROM",
        [15] = "GPU is lost",
        [16] = "GPU requires reset",
        [17] = "The operating system has blocked the request",
        [18] = "Driver/library version mismatch",
        [19] = "In use by another client",
        [20] = "Insufficient Memory",
        [21] = "No data",
        [22] = "ECC is not supported by vGPU",
        [23] = "Insufficient resources",
        [24] = "Frequency not supported",
        [25] = "Argument version mismatch",
        [26] = "Deprecated",
        [27] = "Not ready",
        [28] = "GPU not found",
        [29] = "Invalid state",
        [30] = "Reset type not supported",
    };
    unsigned number = (unsigned)result;
    return number < sizeof text / sizeof *text && text[number] ? text[number] : "Unknown Error";
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    SYSTEM_CALL(STANDIN_DRIVER_VERSION, version);
    const char *says = getenv("NVML_STANDIN_SAYS"); /* a driver that does not do what its version lets expect */
    return give_text(says ? says : state->driver_version, version, length);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[96];
    SYSTEM_CALL(STANDIN_OTHER, version);
    snprintf(text, sizeof text, "12.%s", state->driver_version);
    return give_text(text, version, length);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    SYSTEM_CALL(STANDIN_OTHER, version);
    *version = driver_row(state->driver_version) == 4 ? 12080 : 12020;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    SYSTEM_CALL(STANDIN_COUNT, count);
    *count = state->device_count;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    SYSTEM_CALL(STANDIN_HANDLE, device);
    if (index >= state->device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &handles[index];
    return device_error(index, STANDIN_HANDLE);
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    SYSTEM_CALL(STANDIN_HANDLE, device);
    if (!uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < state->device_count; i++)
        if (strcmp(state->devices[i].uuid, uuid) == 0) {
            *device = &handles[i];
            return device_error(i, STANDIN_HANDLE);
        }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    DEVICE_CALL(device, STANDIN_UUID, uuid);
    const struct standin_device *d = &state->devices[device->index];
    return give_text(device->mig == NO_MIG ? d->uuid : d->migs[device->mig].uuid, uuid, length);
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    DEVICE_CALL(device, STANDIN_NAME, name);
    const struct standin_device *d = &state->devices[device->index];
    if (device->mig == NO_MIG)
        return give_text(d->name, name, length);
    /* A slice of the size of an A100's: one of compute for each 5 GiB. */
    unsigned gib = (unsigned)(d->migs[device->mig].memory_total >> 30);
    char text[160];
    snprintf(text, sizeof text, "%s MIG %ug.%ugb", d->name, gib / 5, gib);
    return give_text(text, name, length);
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    WHOLE_DEVICE_CALL(device, STANDIN_OTHER, index);
    *index = device->index;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    WHOLE_DEVICE_CALL(device, STANDIN_MINOR, minor);
    *minor = state->devices[device->index].minor;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned int *mode)
{
    WHOLE_DEVICE_CALL(device, STANDIN_OTHER, mode);
    *mode = state->faults & STANDIN_VGPU ? 2 : 0; /* a guest's, or none */
    return NVML_SUCCESS;
}

/* Where it sits: a bus of its own, counted from the minor number, which a device keeps. */
static void place_of(unsigned minor, nvmlPciInfo_t *pci)
{
    unsigned bus = (0x3b + minor) & 0xff;
    *pci = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = 0x20b010deu, .pciSubSystemId = 0x134f10deu};
    snprintf(pci->bus_id, sizeof(pci->bus_id), "00000000:%02X:00.0", bus);
    snprintf(pci->bus_id_legacy, sizeof(pci->bus_id_legacy), "0000:%02X:00.0", bus);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    WHOLE_DEVICE_CALL(device, STANDIN_OTHER, pci);
    place_of(state->devices[device->index].minor, pci);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    WHOLE_DEVICE_CALL(device, STANDIN_OTHER, active);
    unsigned links = state->devices[device->index].nvlinks;
    if (!links)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link > links) /* there is one more, which is not active */
        return NVML_ERROR_INVALID_ARGUMENT;
    *active = link < links;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci)
{
    WHOLE_DEVICE_CALL(device, STANDIN_OTHER, pci);
    const struct standin_device *d = &state->devices[device->index];
    if (link >= d->nvlinks)
        return NVML_ERROR_INVALID_ARGUMENT;
    place_of(d->minor ^ 1, pci);
    return NVML_SUCCESS;
}

static void memory_of(nvmlDevice_t device, uint64_t *total, uint64_t *used)
{
    const struct standin_device *d = &state->devices[device->index];
    *total = device->mig == NO_MIG ? d->memory_total : d->migs[device->mig].memory_total;
    *used = device->mig == NO_MIG ? d->memory_used : d->migs[device->mig].memory_used;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    uint64_t total, used;
    DEVICE_CALL(device, STANDIN_MEMORY, memory);
    memory_of(device, &total, &used);
    *memory = (nvmlMemory_t){.total = total, .used = used, .free = total - used};
    return NVML_SUCCESS;
}

#if NVML_SINCE >= 510
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    uint64_t total, used;
    DEVICE_CALL(device, STANDIN_MEMORY, memory);
    if (memory->version != MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory_of(device, &total, &used);
    memory->total = total;
    memory->reserved = 0;
    memory->used = used;
    memory->free = total - used;
    return NVML_SUCCESS;
}
#endif

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct row rows[MAX_ROWS];
    WHOLE_DEVICE_CALL(device, STANDIN_RATES, utilization);
    if (state->devices[device->index].mig_enabled)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned n = collect_samples(device->index, wall_us() - 1000000u, rows), gpu = 0, memory = 0;
    for (unsigned i = 0; i < n; i++) {
        gpu += rows[i].sm;
        memory += rows[i].mem;
    }
    utilization->gpu = gpu < 100 ? gpu : 100;
    utilization->memory = memory < 100 ? memory : 100;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius)
{
    WHOLE_DEVICE_CALL(device, STANDIN_TEMPERATURE, celsius);
    if (sensor != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = state->devices[device->index].temperature_c;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    WHOLE_DEVICE_CALL(device, STANDIN_POWER, milliwatts);
    *milliwatts = state->devices[device->index].power_mw;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    WHOLE_DEVICE_CALL(device, STANDIN_MIG_MODE, current && pending);
    *current = *pending = state->devices[device->index].mig_enabled;
    return NVML_SUCCESS;
}

/* ---- ECC ------------------------------------------------------------------------------------------------- */

static nvmlReturn_t ecc_count(nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count)
{
    WHOLE_DEVICE_CALL(device, STANDIN_ECC, count);
    const struct standin_device *d = &state->devices[device->index];
    if (type > 1 || counter > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!d->ecc_enabled)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = type == 0 ? 0 : counter == 0 ? d->ecc_volatile : d->ecc_aggregate;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                             unsigned long long *count)
{
    return ecc_count(device, type, counter, count);
}

/* Every error is one of the device memory (location 2). */
API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter,
                                                 unsigned location, unsigned long long *count)
{
    nvmlReturn_t ret = ecc_count(device, type, counter, count);
    if (ret == NVML_SUCCESS && location > 6)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (ret == NVML_SUCCESS && location != 2)
        *count = 0;
    return ret;
}

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    WHOLE_DEVICE_CALL(device, STANDIN_ECC, current && pending);
    *current = *pending = state->devices[device->index].ecc_enabled;
    return NVML_SUCCESS;
}

/* ---- events -------------------------------------------------------------------------------------------------- */

#define EVENT_XID 8ull
#define EVENTS 0x19cull /* and states of performance, clocks, power and MIG, of which none comes */

typedef struct {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} nvmlEventData_t;

/* What happened after a device was registered, and was not told yet. */
typedef struct standin_events {
    unsigned registered[STANDIN_DEVICES], told[STANDIN_DEVICES];
} *nvmlEventSet_t;

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    SYSTEM_CALL(STANDIN_EVENTS, set);
    *set = calloc(1, sizeof(**set));
    return *set ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    SYSTEM_CALL(STANDIN_OTHER, set);
    free(set);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    WHOLE_DEVICE_CALL(device, STANDIN_EVENTS, types);
    *types = EVENTS;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    WHOLE_DEVICE_CALL(device, STANDIN_EVENTS, set);
    if (types & ~EVENTS)
        return NVML_ERROR_NOT_SUPPORTED;
    set->registered[device->index] = 1;
    set->told[device->index] = state->devices[device->index].xids_total;
    return NVML_SUCCESS;
}

/* The oldest of a device that was not told; 0: there is none. */
static int next_event(nvmlEventSet_t set, nvmlEventData_t *data, nvmlReturn_t *ret)
{
    for (unsigned i = 0; i < STANDIN_DEVICES; i++) {
        const struct standin_device *d = &state->devices[i];
        if (!set->registered[i])
            continue;
        if (d->lost) {
            *ret = NVML_ERROR_GPU_IS_LOST;
            return 1;
        }
        unsigned total = __atomic_load_n(&d->xids_total, __ATOMIC_ACQUIRE);
        if (total - set->told[i] > STANDIN_XIDS)
            set->told[i] = total - STANDIN_XIDS;
        if (set->told[i] == total)
            continue;
        unsigned xid = d->xids[set->told[i]++ % STANDIN_XIDS];
        *data = (nvmlEventData_t){&handles[i], EVENT_XID, xid, 0xFFFFFFFFu, 0xFFFFFFFFu};
        *ret = NVML_SUCCESS;
        return 1;
    }
    return 0;
}

API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    nvmlReturn_t ret = ready(STANDIN_EVENTS);
    if (ret != NVML_SUCCESS)
        return ret;
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t until = wall_us() + timeout_ms * 1000ull;
    while (!next_event(set, data, &ret)) {
        if (wall_us() >= until)
            return NVML_ERROR_TIMEOUT;
        usleep(1000);
    }
    return ret;
}

/* ---- MIG ------------------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    WHOLE_DEVICE_CALL(device, STANDIN_MIG_DEVICES, count);
    *count = state->devices[device->index].mig_enabled ? STANDIN_MIGS - 1 : 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    WHOLE_DEVICE_CALL(device, STANDIN_MIG_DEVICES, mig);
    const struct standin_device *d = &state->devices[device->index];
    if (!d->mig_enabled)
        return NVML_ERROR_NOT_SUPPORTED;
    if (index >= STANDIN_MIGS - 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!d->migs[index].uuid[0])
        return NVML_ERROR_NOT_FOUND;
    *mig = &mig_handles[device->index][index];
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_id(nvmlDevice_t device, int compute, unsigned *id)
{
    DEVICE_CALL(device, STANDIN_MIG_DEVICES, id);
    if (device->mig == NO_MIG)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct standin_mig *m = &state->devices[device->index].migs[device->mig];
    *id = compute ? m->compute_instance : m->gpu_instance;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    return instance_id(device, 0, id);
}

API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    return instance_id(device, 1, id);
}

/* ---- process lists ------------------------------------------------------------------------------------------ */

/* The size protocol of the process lists: *count is the room in, the number of entries out; an empty list is a
 * success even with no room; too little room says how much is needed. */
static nvmlReturn_t list_processes(nvmlDevice_t device, int mps, unsigned *count, const void *infos,
                                   struct row *rows)
{
    WHOLE_DEVICE_CALL(device, mps ? STANDIN_MPS_LIST : STANDIN_PROCESS_LIST, count);
    if (*count && !infos)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned room = *count, n = collect_processes(device->index, mps, rows);
    unsigned needed = room && !mps ? grow_before_fetch(n) : n;
    if (needed > n)
        n = collect_processes(device->index, mps, rows);
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t list_v1(nvmlDevice_t device, int mps, unsigned *count, nvmlProcessInfo_v1_t *infos)
{
    struct row rows[MAX_ROWS];
    nvmlReturn_t ret = list_processes(device, mps, count, infos, rows);
    for (unsigned i = 0; ret == NVML_SUCCESS && i < *count; i++)
        infos[i] = (nvmlProcessInfo_v1_t){.pid = rows[i].pid, .usedGpuMemory = rows[i].memory};
    return ret;
}

static nvmlReturn_t list_v2(nvmlDevice_t device, int mps, unsigned *count, nvmlProcessInfo_v2_t *infos)
{
    struct row rows[MAX_ROWS];
    nvmlReturn_t ret = list_processes(device, mps, count, infos, rows);
    for (unsigned i = 0; ret == NVML_SUCCESS && i < *count; i++)
        infos[i] = (nvmlProcessInfo_v2_t){.pid = rows[i].pid,
                                          .usedGpuMemory = rows[i].memory,
                                          .gpuInstanceId = 0xFFFFFFFFu,
                                          .computeInstanceId = 0xFFFFFFFFu};
    return ret;
}

#define PROCESS_LIST(name, mps, version)                                                                        \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_##version##_t *infos)       \
    {                                                                                                           \
        return list_##version(device, mps, count, infos);                                                       \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, 0, v1)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, 0, v2)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, 1, v1)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 1, v2)
#if NVML_SINCE >= 510
/* From 535.43.02 to 535.98 an entry ends with usedGpuCcProtectedMemory, which no other series has. */
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                         nvmlProcessInfo_v2_t *infos)
{
    nvmlReturn_t ret = list_v2(device, 0, count, infos);
    unsigned long v = version_number(state->driver_version);
    if (ret == NVML_SUCCESS && v >= version_number("535.43.02") && v <= version_number("535.98"))
        for (unsigned i = *count; i-- > 0;) {
            nvmlProcessInfo_v2_t entry = infos[i];
            char *at = (char *)infos + i * 32ul;
            if (i * 32ul + 32 <= *count * sizeof entry) /* the caller's buffer has no more room */
                memcpy(at, &entry, sizeof entry);
            else
                memset((char *)infos + i * sizeof entry, 0xff, sizeof entry);
        }
    return ret;
}
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 1, v2)
#endif

/* ---- utilization samples ----------------------------------------------------------------------------------- */

/* The size protocol of the samples: a place for each of the ring is required, however few processes there are. */
static nvmlReturn_t list_samples(unsigned device, unsigned *count, const void *buffer, uint64_t since, struct row *rows)
{
    unsigned n = collect_samples(device, since, rows), needed = n < RING ? RING : n;
    if (!buffer || *count < needed) {
        *count = needed;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    *count = n;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                 unsigned int *count, unsigned long long since)
{
    struct row rows[MAX_ROWS];
    WHOLE_DEVICE_CALL(device, STANDIN_UTILIZATION, count);
    if (state->devices[device->index].mig_enabled || (state->faults & STANDIN_PROCESS_UTILIZATION_UNSUPPORTED))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t ret = list_samples(device->index, count, samples, since, rows);
    for (unsigned i = 0; ret == NVML_SUCCESS && i < *count; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){.pid = rows[i].pid,
                                                      .timeStamp = rows[i].time_us,
                                                      .smUtil = rows[i].sm,
                                                      .memUtil = rows[i].mem,
                                                      .encUtil = rows[i].enc,
                                                      .decUtil = rows[i].dec};
    return ret;
}

#if NVML_SINCE >= 550
API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info)
{
    struct row rows[MAX_ROWS];
    WHOLE_DEVICE_CALL(device, STANDIN_UTILIZATION, info);
    if (info->version != PROCESSES_UTILIZATION_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (state->devices[device->index].mig_enabled || (state->faults & STANDIN_PROCESSES_INFO_UNSUPPORTED))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t ret = list_samples(device->index, &info->processSamplesCount, info->procUtilArray,
                                    info->lastSeenTimeStamp, rows);
    for (unsigned i = 0; ret == NVML_SUCCESS && i < info->processSamplesCount; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.timeStamp = rows[i].time_us,
                                                                   .pid = rows[i].pid,
                                                                   .smUtil = rows[i].sm,
                                                                   .memUtil = rows[i].mem,
                                                                   .encUtil = rows[i].enc,
                                                                   .decUtil = rows[i].dec};
    return ret;
}
#endif

/* ---- the device's own samples ------------------------------------------------------------------------------- */

typedef struct {
    unsigned long long timeStamp;
    unsigned long long value;
} nvmlSample_t;

/* The device's periods in the order of the ring's places. */
static unsigned collect_periods(unsigned device, uint64_t since_us, nvmlSample_t *out)
{
    struct period ring[RING];
    unsigned n = 0;
    uint64_t seq;
    do {
        seq = read_begin();
        read_ring(device, ring, NULL, NULL);
    } while (read_retry(seq));
    for (unsigned i = UNSEEN + 1; i < RING; i++)
        if (ring[i].time_us > since_us)
            out[n++] = (nvmlSample_t){ring[i].time_us, ring[i].sm};
    return n;
}

API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned type, unsigned long long since, unsigned *kind,
                                      unsigned *count, nvmlSample_t *samples)
{
    nvmlSample_t found[RING];
    WHOLE_DEVICE_CALL(device, STANDIN_PERIODS, kind && count);
    if (state->devices[device->index].mig_enabled || type != 1)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned n = collect_periods(device->index, since, found), room = *count;
    *kind = 1; /* unsigned int */
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    *count = n;
    if (!samples)
        return NVML_SUCCESS;
    *count = n < room ? n : room;
    memcpy(samples, found, *count * sizeof *found);
    return NVML_SUCCESS;
}
