/*
 * The state file between the GPU stand-in (tests/fakes/gpu.py, the only writer) and every process that has
 * loaded the stand-in for libnvidia-ml.so.1 (readers, read-only mapping).
 *
 * Consistency: `seq` is odd while the writer works. A reader takes `seq`, reads in place, and starts over if
 * `seq` was odd or has changed. gpu.py holds a ctypes twin of these structs; the sizes below pin both.
 *
 * All integers are little-endian, times are microseconds since the epoch, memory is bytes.
 */
#ifndef STANDIN_STATE_H
#define STANDIN_STATE_H

#include <stdint.h>

#define STANDIN_MAGIC 0x314c4d564e444e53ULL
#define STANDIN_VERSION 4u
#define STANDIN_LEVELS 32
#define STANDIN_DEVICES 24
#define STANDIN_MIGS 8   /* instances of one device; NVML allows seven */
#define STANDIN_CALLS 24 /* room for enum standin_answer */
#define STANDIN_PROCESSES 256
#define STANDIN_SAMPLES 2048
#define STANDIN_XIDS 8 /* the last errors of a device; older ones are forgotten */

/* A process as the kernel numbers it, outermost namespace first, as in the NSpid line. */
struct standin_level {
    uint32_t pidns; /* inode of /proc/<pid>/ns/pid at this level */
    int32_t nr;     /* its PID there */
};

struct standin_chain {
    uint32_t depth;
    uint32_t pad;
    struct standin_level level[STANDIN_LEVELS];
};

struct standin_mig {
    char uuid[96]; /* empty: there is no instance at this index */
    uint64_t memory_total;
    uint64_t memory_used;
    uint32_t gpu_instance;
    uint32_t compute_instance;
};

struct standin_device {
    char uuid[96];
    char name[96];
    uint64_t memory_total;
    uint64_t memory_used;
    uint64_t ecc_volatile;  /* uncorrected errors since the driver was loaded */
    uint64_t ecc_aggregate; /* in the life of the device */
    uint32_t minor;
    uint32_t mig_enabled;
    uint32_t lost; /* every call on this device answers GPU_IS_LOST */
    uint32_t temperature_c;
    uint32_t power_mw;
    uint32_t ecc_enabled;
    uint32_t xids_total; /* XID errors ever; the newest is at (xids_total - 1) % STANDIN_XIDS */
    uint32_t nvlinks; /* active ones, all to the device whose minor number differs in the last bit; 0: it has none */
    uint32_t xids[STANDIN_XIDS];
    uint32_t errors[STANDIN_CALLS]; /* by enum standin_answer: the nvmlReturn_t to answer, 0 for the truth */
    struct standin_mig migs[STANDIN_MIGS];
};

/* One compute context: one entry of the process list of one device. */
struct standin_process {
    uint32_t device; /* index into devices */
    uint32_t mps;    /* a client of the MPS server: in the MPS process list only */
    uint64_t memory; /* all ones: not available */
    struct standin_chain chain; /* of the process, or of one of its threads (list_threads) */
};

/* One utilization sample. The ring keeps samples of processes that have ended. Without a process (depth 0) the device
 * was idle. Samples of a device with the same time are of one period of it. */
struct standin_sample {
    uint64_t time_us;
    uint32_t device;
    uint32_t sm, mem, enc, dec;
    uint32_t period; /* the device's, counted from 0: its place in the ring is the rest of a division by 72 */
    struct standin_chain chain;
};

enum standin_fault {
    STANDIN_DRIVER_NOT_LOADED = 1 << 0,
    STANDIN_PROCESS_UTILIZATION_UNSUPPORTED = 1 << 1,   /* nvmlDeviceGetProcessUtilization only */
    STANDIN_PROCESSES_INFO_UNSUPPORTED = 1 << 2,        /* nvmlDeviceGetProcessesUtilizationInfo only */
    STANDIN_PID_ZERO = 1 << 3,                          /* one more entry, with PID 0, in both lists */
    STANDIN_VGPU = 1 << 4,                              /* a vGPU guest, whose samples are not translated */
};

/* Calls that can be made to hang, as bits of `hang`. A hung call goes on when its bit is cleared. */
enum standin_call {
    STANDIN_HANG_INIT = 1 << 0,
    STANDIN_HANG_UTILIZATION = 1 << 1,
};

/* Calls that can be made to answer with an error, as indexes of `errors`. */
enum standin_answer {
    STANDIN_INIT,
    STANDIN_COUNT,
    STANDIN_DRIVER_VERSION,
    STANDIN_HANDLE,
    STANDIN_ANY, /* every call that takes a device */
    STANDIN_UUID,
    STANDIN_NAME,
    STANDIN_MINOR,
    STANDIN_MEMORY,
    STANDIN_RATES,
    STANDIN_TEMPERATURE,
    STANDIN_POWER,
    STANDIN_ECC,
    STANDIN_MIG_MODE,
    STANDIN_MIG_DEVICES, /* how many, their handles, their instance ids */
    STANDIN_PROCESS_LIST,
    STANDIN_MPS_LIST,
    STANDIN_UTILIZATION,
    STANDIN_OTHER,
    STANDIN_EVENTS,  /* supported events, registering, waiting */
    STANDIN_PERIODS, /* the device's own samples */
};

struct standin_state {
    uint64_t magic;
    uint32_t version;
    uint32_t size; /* sizeof(struct standin_state) */
    uint64_t seq;
    char driver_version[80];
    uint32_t driver_pidns; /* the namespace whose PIDs are "host PIDs" */
    uint32_t faults;       /* enum standin_fault */
    uint32_t hang;         /* enum standin_call */
    uint32_t grow;         /* lists grow this many times between size query and fetch, per calling process */
    uint32_t device_count;
    uint32_t process_count;
    uint32_t errors[STANDIN_CALLS]; /* on any device, and of the calls that take none */
    uint64_t samples_total; /* ever written; the newest is at (samples_total - 1) % STANDIN_SAMPLES */
    struct standin_device devices[STANDIN_DEVICES];
    struct standin_process processes[STANDIN_PROCESSES];
    struct standin_sample samples[STANDIN_SAMPLES];
};

_Static_assert(sizeof(struct standin_chain) == 264, "chain");
_Static_assert(sizeof(struct standin_mig) == 120, "mig");
_Static_assert(sizeof(struct standin_device) == 1344, "device");
_Static_assert(sizeof(struct standin_process) == 280, "process");
_Static_assert(sizeof(struct standin_sample) == 296, "sample");
_Static_assert(sizeof(struct standin_state) == 232 + 24 * 1344 + 256 * 280 + 2048 * 296, "state");

#endif
