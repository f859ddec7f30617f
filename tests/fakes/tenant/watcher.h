/* The two things a tenant does with NVML: guess its own host PID once, and refill the region every 120 ms. */
#ifndef TENANT_WATCHER_H
#define TENANT_WATCHER_H

#include "region.h"

struct gpu_use {
    const char *const *uuids; /* of the region, in its order */
    int device_num;
    const char *const *used; /* devices this process makes a context on */
    int used_num;
    uint64_t memory;
};

/* Makes the contexts; with `guess`, the one entry that the process list gains is returned, else 0. */
int make_contexts(const struct gpu_use *use, int guess);

/* Starts the watcher, which sleeps for ever when there is no core limit. */
int watcher_start(struct region *r, const struct gpu_use *use);

#endif
