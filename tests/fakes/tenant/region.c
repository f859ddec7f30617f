#define _GNU_SOURCE
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const struct layout layouts[] = {
#include "layouts.h" /* written by build.py */
    {.name = NULL},
};

const struct layout *layout_by_name(const char *name)
{
    for (const struct layout *l = layouts; l->name; l++)
        if (strcmp(l->name, name) == 0)
            return l;
    return NULL;
}

static int complain(const char *what, const char *path)
{
    fprintf(stderr, "tenant: cannot %s %s: %s\n", what, path, strerror(errno));
    return -1;
}

/* ---- opening ----------------------------------------------------------------------------------------------- */

static void initialise(struct region *r, const struct region_setup *setup)
{
    const struct layout *l = r->layout;
    if (l->minor_version != ABSENT) {
        *i32_at(r, 4) = 1;
        *i32_at(r, 8) = (int32_t)l->minor_version;
    }
    sem_init((sem_t *)(void *)(r->base + l->sem), 1, 1);
    if (l->sem_postinit != ABSENT)
        sem_init((sem_t *)(void *)(r->base + l->sem_postinit), 1, 1);
    *u64_at(r, l->owner_pid) = 0;
    *u64_at(r, l->device_num) = (uint64_t)setup->device_num;
    for (int d = 0; d < setup->device_num; d++) {
        snprintf(r->base + l->uuids + d * UUID_LENGTH, UUID_LENGTH, "%s", setup->uuids[d]);
        *u64_at(r, l->limit + 8 * d) = setup->memory_limit;
        *u64_at(r, l->sm_limit + 8 * d) = setup->sm_limit ? setup->sm_limit : 100;
    }
    *region_proc_num(r) = 0;
    *i32_at(r, l->proc_num + 4) = 1; /* utilization_switch */
    *i32_at(r, l->proc_num + 8) = 2; /* recent_kernel */
    *i32_at(r, l->proc_num + 12) = setup->priority;
    if (l->last_kernel_time != ABSENT)
        *u64_at(r, l->last_kernel_time) = (uint64_t)time(NULL);
    __atomic_store_n(i32_at(r, 0), REGION_MAGIC, __ATOMIC_RELEASE);
}

/* As HAMi-core does where nobody else makes its directory. */
static void make_directory(const char *path)
{
    char directory[PATH_MAX];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (slash && slash != directory) {
        *slash = 0;
        mkdir(directory, 0777);
    }
}

int region_open(struct region *r, const struct layout *layout, const char *path, const struct region_setup *setup)
{
    mode_t old = umask(0);
    make_directory(path);
    r->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666); /* and never closed: inotify sees the process's end */
    umask(old);
    if (r->fd < 0)
        return complain("open", path);
    /* Every process writes the one byte behind the region, which is also what gives the file its size. */
    if (lseek(r->fd, layout->size, SEEK_SET) < 0 || write(r->fd, "", 1) != 1 || lseek(r->fd, 0, SEEK_SET) < 0)
        return complain("size", path);
    r->layout = layout;
    r->base = mmap(NULL, (size_t)layout->size + 1, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, 0);
    if (r->base == MAP_FAILED)
        return complain("map", path);
    /* Initialised by exactly one process: a POSIX lock on the file, as upstream has it. */
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(r->fd, F_SETLKW, &whole) < 0)
        return complain("lock", path);
    if (*i32_at(r, 0) != REGION_MAGIC)
        initialise(r, setup);
    whole.l_type = F_UNLCK;
    fcntl(r->fd, F_SETLK, &whole);
    return 0;
}

/* ---- the semaphore ----------------------------------------------------------------------------------------- */

static int alive(int64_t ns_pid)
{
    return ns_pid > 0 && (kill((pid_t)ns_pid, 0) == 0 || errno == EPERM);
}

/* An owner that is dead *in this namespace* loses the lock to the first who can set himself in its place. */
static int take_over(struct region *r, uint64_t dead)
{
    uint64_t self = (uint64_t)getpid();
    return __atomic_compare_exchange_n(u64_at(r, r->layout->owner_pid), &dead, self, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

int region_lock(struct region *r)
{
    sem_t *sem = (sem_t *)(void *)(r->base + r->layout->sem);
    for (int tries = 0; tries < r->lock_tries; tries++) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        int64_t ns = until.tv_nsec + r->lock_timeout_ms % 1000 * 1000000ll;
        until.tv_sec += r->lock_timeout_ms / 1000 + ns / 1000000000ll;
        until.tv_nsec = ns % 1000000000ll;
        int got;
        while ((got = sem_timedwait(sem, &until)) < 0 && errno == EINTR)
            ;
        if (got == 0) {
            __atomic_store_n(u64_at(r, r->layout->owner_pid), (uint64_t)getpid(), __ATOMIC_SEQ_CST);
            return 0;
        }
        uint64_t owner = __atomic_load_n(u64_at(r, r->layout->owner_pid), __ATOMIC_SEQ_CST);
        if (owner != 0 && !alive((int64_t)owner) && take_over(r, owner))
            return 0;
    }
    fprintf(stderr, "tenant %d: the lock was not free in %d waits of %d ms, owner_pid is %lu\n", getpid(), r->lock_tries,
            r->lock_timeout_ms, (unsigned long)*u64_at(r, r->layout->owner_pid));
    return -1;
}

void region_unlock(struct region *r)
{
    __atomic_store_n(u64_at(r, r->layout->owner_pid), 0, __ATOMIC_SEQ_CST);
    sem_post((sem_t *)(void *)(r->base + r->layout->sem));
}

/* ---- slots --------------------------------------------------------------------------------------------------- */

void slot_write_begin(struct region *r, int index)
{
    if (r->layout->seqlock != ABSENT)
        __atomic_fetch_add(u64_at(r, slot_at(r, index) + r->layout->seqlock), 1, __ATOMIC_SEQ_CST);
}

void slot_write_end(struct region *r, int index)
{
    slot_write_begin(r, index);
}

static void slot_clear_counters(struct region *r, int index)
{
    const struct layout *l = r->layout;
    char *slot = r->base + slot_at(r, index);
    memset(slot + l->used, 0, (size_t)(l->used_size * REGION_DEVICES));
    memset(slot + l->monitorused, 0, 8 * REGION_DEVICES);
    if (l->device_util != ABSENT)
        memset(slot + l->device_util, 0, (size_t)(l->device_util_size * REGION_DEVICES));
}

/* One slot less, then the last one over the hole, field by field, pid before hostpid. Most releases leave the last one
 * as it was, above proc_num. */
void slot_remove(struct region *r, int hole)
{
    const struct layout *l = r->layout;
    int last = *region_proc_num(r) - 1;
    __atomic_store_n(region_proc_num(r), last, __ATOMIC_SEQ_CST);
    if (hole != last) {
        char *to = r->base + slot_at(r, hole), *from = r->base + slot_at(r, last);
        __atomic_store_n(slot_pid(r, hole), *slot_pid(r, last), __ATOMIC_SEQ_CST);
        __atomic_store_n(slot_hostpid(r, hole), *slot_hostpid(r, last), __ATOMIC_SEQ_CST);
        memcpy(to + l->used, from + l->used, (size_t)(l->used_size * REGION_DEVICES));
        memcpy(to + l->monitorused, from + l->monitorused, 8 * REGION_DEVICES);
        if (l->device_util != ABSENT)
            memcpy(to + l->device_util, from + l->device_util, (size_t)(l->device_util_size * REGION_DEVICES));
        *slot_status(r, hole) = *slot_status(r, last);
    }
    if (r->clears_moved) {
        *slot_pid(r, last) = 0;
        *slot_hostpid(r, last) = 0;
        *slot_status(r, last) = 0;
        slot_clear_counters(r, last);
    }
}

void slots_remove_dead(struct region *r)
{
    for (int i = 0; i < *region_proc_num(r);) {
        if (alive(*slot_pid(r, i)))
            i++;
        else
            slot_remove(r, i);
    }
}

int slot_own(const struct region *r, pid_t ns_pid)
{
    for (int i = 0; i < *region_proc_num(r) && i < REGION_SLOTS; i++)
        if (*slot_pid(r, i) == ns_pid)
            return i;
    return -1;
}

/* A slot that already carries this PID is taken over as it is: its hostpid stays, whoever's it was. Else the one behind
 * the last is taken, its number first; then come those that are dead, and it moves into the first hole. */
int slot_take(struct region *r, pid_t ns_pid)
{
    int index = slot_own(r, ns_pid);
    if (index < 0) {
        index = *region_proc_num(r);
        if (index >= REGION_SLOTS)
            return -1;
        __atomic_store_n(slot_pid(r, index), ns_pid, __ATOMIC_SEQ_CST);
        *slot_hostpid(r, index) = 0;
        *slot_status(r, index) = 1;
        slot_clear_counters(r, index);
        __atomic_store_n(region_proc_num(r), index + 1, __ATOMIC_SEQ_CST);
    } else {
        slot_write_begin(r, index);
        slot_clear_counters(r, index);
        *slot_status(r, index) = 1;
        slot_write_end(r, index);
    }
    slots_remove_dead(r);
    return slot_own(r, ns_pid);
}

void slot_exit(struct region *r, pid_t ns_pid)
{
    int locked = r->removes_itself && region_lock(r) == 0, index = slot_own(r, ns_pid);
    if (index >= 0 && locked) {
        slot_clear_counters(r, index);
        slot_remove(r, index);
    } else if (index >= 0 && !r->removes_itself) {
        *slot_pid(r, index) = 0;
        *slot_status(r, index) = 0;
    }
    if (locked)
        region_unlock(r);
}
