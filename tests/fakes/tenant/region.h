/*
 * HAMi's shared region as a tenant uses it: the released layouts, the semaphore with its owner, the slots.
 *
 * A layout is a table of byte offsets; nothing here depends on a C struct, so that one binary can play every
 * release. Little-endian, as on every machine HAMi runs on.
 */
#ifndef TENANT_REGION_H
#define TENANT_REGION_H

#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#define REGION_MAGIC 19920718
#define REGION_DEVICES 16
#define REGION_SLOTS 1024
#define UUID_LENGTH 96
#define ABSENT (-1l)

struct layout {
    const char *name;
    long size; /* of the region; the file is one byte longer */
    long minor_version; /* ABSENT: no version fields */
    long owner_pid, sem, sem_postinit, device_num, uuids, limit, sm_limit, procs, proc_num, last_kernel_time;
    long slot_size, seqlock, used, used_size, monitorused, device_util, device_util_size, status;
};

/* Offsets inside one `used` and one `device_util`. */
enum { USED_CONTEXT = 0, USED_TOTAL = 32, UTIL_DEC = 0, UTIL_ENC = 8, UTIL_SM = 16 };

struct region {
    const struct layout *layout;
    char *base;
    int fd;
    int removes_itself; /* at its exit, under the lock; later releases set pid and status to 0, without it */
    int clears_moved;   /* the place that a compaction moved a slot away from */
    int lock_timeout_ms; /* one wait on the semaphore */
    int lock_tries;      /* waits on a living owner before giving up */
};

struct region_setup {
    const char *const *uuids;
    int device_num;
    uint64_t memory_limit;
    uint64_t sm_limit;
    int priority;
};

extern const struct layout layouts[];
const struct layout *layout_by_name(const char *name);

/* Opens or makes the file and initialises it once; returns 0, or -1 after a message on stderr. */
int region_open(struct region *r, const struct layout *layout, const char *path, const struct region_setup *setup);

/* Takes and leaves the semaphore. Lock returns -1 when a living owner kept it for lock_tries waits. */
int region_lock(struct region *r);
void region_unlock(struct region *r);

/* The rest expects the semaphore to be held, except for slot_own. */
void slots_remove_dead(struct region *r);
void slot_remove(struct region *r, int hole);
int slot_take(struct region *r, pid_t ns_pid); /* index, or -1: full */
int slot_own(const struct region *r, pid_t ns_pid);
void slot_exit(struct region *r, pid_t ns_pid); /* takes the lock by itself if it needs it */

/* The seqlock of one's own slot, odd while it is being changed; nothing in layouts that have none. */
void slot_write_begin(struct region *r, int index);
void slot_write_end(struct region *r, int index);

static inline int32_t *i32_at(const struct region *r, long offset)
{
    return (int32_t *)(void *)(r->base + offset);
}

static inline uint64_t *u64_at(const struct region *r, long offset)
{
    return (uint64_t *)(void *)(r->base + offset);
}

static inline long slot_at(const struct region *r, int index)
{
    return r->layout->procs + index * r->layout->slot_size;
}

static inline int32_t *slot_pid(const struct region *r, int index)
{
    return i32_at(r, slot_at(r, index));
}

static inline int32_t *slot_hostpid(const struct region *r, int index)
{
    return i32_at(r, slot_at(r, index) + 4);
}

static inline int32_t *slot_status(const struct region *r, int index)
{
    return i32_at(r, slot_at(r, index) + r->layout->status);
}

static inline uint64_t *slot_monitorused(const struct region *r, int index, int device)
{
    return u64_at(r, slot_at(r, index) + r->layout->monitorused + 8 * device);
}

/* NULL in the layout that has no device_util. */
static inline uint64_t *slot_sm_util(const struct region *r, int index, int device)
{
    const struct layout *l = r->layout;
    if (l->device_util == ABSENT)
        return NULL;
    return u64_at(r, slot_at(r, index) + l->device_util + device * l->device_util_size + UTIL_SM);
}

static inline int32_t *region_proc_num(const struct region *r)
{
    return i32_at(r, r->layout->proc_num);
}

#endif
