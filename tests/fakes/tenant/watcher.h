/* The two things a tenant does with NVML: guess its own host PID once, and fill the region every 120 ms. */
#ifndef TENANT_WATCHER_H
#define TENANT_WATCHER_H

#include "region.h"

struct gpu_use {
    const char *const *uuids; /* of the region, in its order */
    int device_num;
    const char *const *used; /* devices this process makes a context on */
    int used_num;
    const int *order; /* by CUDA's number the device's place in uuids: CUDA_VISIBLE_DEVICES; NULL: the same */
    int visible;      /* so many */
    uint64_t memory;
};

/* What releases do differently (tests/fakes/releases.py). */
struct watcher_ways {
    int zeroes_all;        /* devices, not the first alone */
    int keeps_monitorused; /* while it zeroes sm_util */
    int asks_cuda_number;  /* NVML for the device with CUDA's number (before HAMi-core PR 330), not the one that it is */
    int second_call;       /* where the driver refuses the first one (HAMi-core PR 218) */
    enum { FILLS_SET, FILLS_ADD, FILLS_NOTHING } fills;
};

/* Makes the contexts; with `guess`, the one entry that the process list gains is returned, else 0. */
int make_contexts(const struct gpu_use *use, int guess);

/* Starts the watcher, which sleeps for ever with a core limit above 100 (a missing one is stored as 100). */
int watcher_start(struct region *r, const struct gpu_use *use, const struct watcher_ways *ways);

#endif
