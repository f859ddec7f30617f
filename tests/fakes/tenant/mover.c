/*
 * Compaction as fast as it goes, as the other half of a race test.
 *
 * Every slot belongs to an invented process `p` (numbers from 1000 on, never used twice):
 *   hostpid   begins as original(p): 0, p, or p + 500000; the only right answer is p + 1000000
 *   sm_util   of device 0 begins as 0; the only right answer is p
 * One move ends the process of a random slot (the last slot is copied over it) and starts a new one at the end.
 * After every move all slots are held against these rules, and all other bytes against a shadow. A wrong value
 * is counted once and set back.
 */
#define _GNU_SOURCE
#include "mover.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#define FIRST_PROCESS 1000
#define RIGHT_OFFSET 1000000
#define STALE_OFFSET 500000
#define WHOLE_CHECK_EVERY 1000

static struct {
    long wrong_hostpid, wrong_util, momentary, changed_bytes, owner_violations, repaired, utils_landed;
} count;

static struct region shadow;
static int32_t next_process = FIRST_PROCESS;

static int32_t original(int32_t p)
{
    switch (p % 3) {
    case 0: return 0;
    case 1: return p;
    default: return p + STALE_OFFSET;
    }
}

static void start_process(struct region *r, int32_t p)
{
    int index = *region_proc_num(r);
    const struct layout *l = r->layout;
    *slot_pid(r, index) = p;
    *slot_hostpid(r, index) = original(p);
    char *slot = r->base + slot_at(r, index);
    for (int d = 0; d < REGION_DEVICES; d++)
        *u64_at(r, slot_at(r, index) + l->used + d * l->used_size + USED_TOTAL) = (uint64_t)p * 4096u;
    if (l->device_util != ABSENT)
        memset(slot + l->device_util, 0, (size_t)(l->device_util_size * REGION_DEVICES));
    *slot_status(r, index) = 1;
    __atomic_store_n(region_proc_num(r), index + 1, __ATOMIC_SEQ_CST);
}

static void check_slot(struct region *r, int index)
{
    int32_t p = *slot_pid(r, index), hostpid = __atomic_load_n(slot_hostpid(r, index), __ATOMIC_SEQ_CST);
    if (hostpid == p + RIGHT_OFFSET) {
        count.repaired++;
    } else if (hostpid != original(p)) {
        count.wrong_hostpid++;
        *slot_hostpid(r, index) = original(p);
    }
    uint64_t *sm = slot_sm_util(r, index, 0);
    if (!sm || *sm == 0)
        return;
    if (*sm == (uint64_t)p) {
        count.utils_landed++;
    } else {
        count.wrong_util++;
        *sm = 0;
    }
}

/* Counts differing bytes in [from, to) and puts the shadow's bytes back, so that each is counted once. */
static void compare(struct region *r, long from, long to)
{
    if (memcmp(r->base + from, shadow.base + from, (size_t)(to - from)) == 0)
        return;
    for (long i = from; i < to; i++)
        if (r->base[i] != shadow.base[i]) {
            count.changed_bytes++;
            r->base[i] = shadow.base[i];
        }
}

/* A slot without the bytes that may be written from outside: hostpid, and the device_util words. */
static void compare_slot(struct region *r, int index)
{
    const struct layout *l = r->layout;
    long slot = slot_at(r, index);
    compare(r, slot, slot + 4);
    if (l->device_util == ABSENT) {
        compare(r, slot + 8, slot + l->slot_size);
        return;
    }
    compare(r, slot + 8, slot + l->device_util);
    compare(r, slot + l->device_util + l->device_util_size * REGION_DEVICES, slot + l->slot_size);
}

static void compare_all(struct region *r)
{
    const struct layout *l = r->layout;
    for (int i = 0; i < REGION_SLOTS; i++)
        compare_slot(r, i);
    compare(r, l->proc_num, l->size + 1);
}

/* Everything before the slots, without the semaphore, which this very process changes. */
static void compare_header(struct region *r)
{
    const struct layout *l = r->layout;
    compare(r, 0, l->owner_pid);
    compare(r, l->sem + 32, l->procs);
}

static void check_lock_is_ours(struct region *r)
{
    int value = -1;
    sem_getvalue((sem_t *)(void *)(r->base + r->layout->sem), &value);
    if (*u64_at(r, r->layout->owner_pid) != (uint64_t)getpid() || value != 0)
        count.owner_violations++;
}

static int move_once(struct region *r, long done)
{
    if (region_lock(r) < 0)
        return -1;
    check_lock_is_ours(r);
    int hole = (int)(random() % *region_proc_num(r)), slots = *region_proc_num(r);
    slot_remove(r, hole);
    slot_remove(&shadow, hole);
    start_process(r, next_process);
    start_process(&shadow, next_process);
    next_process++;
    for (int i = 0; i < slots; i++) {
        check_slot(r, i);
        compare_slot(r, i);
    }
    compare_header(r);
    if (done % WHOLE_CHECK_EVERY == 0)
        compare_all(r);
    check_lock_is_ours(r);
    region_unlock(r);
    return 0;
}

/* ---- ends and starts ------------------------------------------------------------------------------------------- */

/*
 * Processes end, start and are compacted as upstream does it, and every load is 0 or LOAD: what is moved in often equals
 * what was there. The only writes allowed from outside are those to slots that no process has. A load that is not the
 * slot's own is `momentary` if it gets right by itself, and else `wrong_util`.
 */
#define LOAD 50
#define SETTLES_US 60000000

static int one_processor;
static uint64_t said[REGION_SLOTS]; /* by slot in use: what its process said of device 0 */

static void say(struct region *r, int index, uint64_t load)
{
    *slot_sm_util(r, index, 0) = said[index] = load;
}

static void check_said(struct region *r)
{
    for (int i = 0; i < *region_proc_num(r); i++) {
        volatile uint64_t *sm = slot_sm_util(r, i, 0);
        if (*slot_pid(r, i) == 0 || *sm == said[i])
            continue;
        count.momentary++;
        for (int waited = 0; *sm != said[i] && waited < SETTLES_US; waited += 100)
            usleep(100);
        if (*sm != said[i]) {
            count.wrong_util++;
            *sm = said[i];
        }
    }
}

static void compact(struct region *r)
{
    for (int i = 0; i < *region_proc_num(r);)
        if (*slot_pid(r, i)) {
            i++;
        } else {
            said[i] = said[*region_proc_num(r) - 1];
            slot_remove(r, i);
        }
}

static void end_process(struct region *r, int index)
{
    *slot_pid(r, index) = 0;
    *slot_status(r, index) = 0;
}

/* On one processor nobody writes while this process spins: it sleeps, and interrupts the writer when it wakes. */
static void pause_for(long spins)
{
    if (one_processor) {
        usleep((useconds_t)(spins / 100));
        return;
    }
    for (volatile long i = 0; i < spins; i++)
        ;
}

static int life_once(struct region *r, int slots)
{
    int used = *region_proc_num(r), one = (int)(random() % used);
    switch (random() % 4) {
    case 0:
        if (used > slots / 2)
            end_process(r, one);
        break;
    case 1:
        if (region_lock(r) < 0)
            return -1;
        compact(r);
        region_unlock(r);
        break;
    case 2:
        if (used == slots || region_lock(r) < 0)
            return used == slots ? 0 : -1;
        said[used] = 0;
        start_process(r, next_process++);
        compact(r);
        region_unlock(r);
        break;
    default:
        if (*slot_pid(r, one))
            say(r, one, random() % 2 ? LOAD : 0);
    }
    pause_for(random() % 4000);
    check_said(r);
    return *region_proc_num(r) ? 0 : -1;
}

int mover_run(struct region *r, long moves, int slots, int ends)
{
    char line[64];
    size_t bytes = (size_t)r->layout->size + 1;
    shadow = *r;
    shadow.base = malloc(bytes);
    if (!shadow.base || region_lock(r) < 0)
        return 1;
    for (int i = 0; i < slots; i++)
        start_process(r, next_process++);
    memcpy(shadow.base, r->base, bytes);
    region_unlock(r);
    printf("{\"event\":\"ready\",\"ns_pid\":%d,\"slots\":%d,\"first\":%d,\"right_offset\":%d}\n", getpid(), slots,
           FIRST_PROCESS, RIGHT_OFFSET);
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin))
        line[0] = 0; /* nobody to wait for */
    cpu_set_t processors;
    one_processor = sched_getaffinity(0, sizeof processors, &processors) == 0 && CPU_COUNT(&processors) == 1;
    if (one_processor)
        prctl(PR_SET_TIMERSLACK, 1); /* else every sleep is 50 us and more */
    long done = 0;
    while (done < moves && (ends ? life_once(r, slots) : move_once(r, done)) == 0)
        done++;
    printf("{\"event\":\"moved\",\"moves\":%ld,\"wrong_hostpid\":%ld,\"wrong_util\":%ld,"
           "\"momentary\":%ld,\"changed_bytes_elsewhere\":%ld,\"owner_pid_violations\":%ld,\"right_hostpid_seen\":%ld,"
           "\"right_util_seen\":%ld}\n",
           done, count.wrong_hostpid, count.wrong_util, count.momentary, count.changed_bytes, count.owner_violations, count.repaired,
           count.utils_landed);
    return done == moves ? 0 : 1;
}
