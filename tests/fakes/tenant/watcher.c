#define _GNU_SOURCE
#include "watcher.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

#define TICK_US 120000

/* ---- the guess ------------------------------------------------------------------------------------------------- */

static int contains(const struct listed *list, int n, unsigned pid)
{
    for (int i = 0; i < n; i++)
        if (list[i].pid == pid)
            return 1;
    return 0;
}

/* Two new entries are a lost race: somebody else started at the same time, and nothing tells them apart. */
static int only_new_entry(const struct listed *before, int n_before, const struct listed *after, int n_after)
{
    unsigned found = 0;
    for (int i = 0; i < n_after; i++) {
        if (contains(before, n_before, after[i].pid))
            continue;
        if (found)
            return 0;
        found = after[i].pid;
    }
    return (int)found;
}

int make_contexts(const struct gpu_use *use, int guess)
{
    static struct listed before[LIST_MAX], after[LIST_MAX];
    int n_before = guess ? nvml_list(use->used[0], before) : -1;
    for (int d = 0; d < use->used_num; d++)
        if (driver_context(use->used[d], use->memory) < 0)
            return 0;
    int n_after = n_before >= 0 ? nvml_list(use->used[0], after) : -1;
    return n_after < 0 ? 0 : only_new_entry(before, n_before, after, n_after);
}

/* ---- the watcher ----------------------------------------------------------------------------------------------- */

static struct region *region;
static struct gpu_use gpu;
static struct watcher_ways ways;

static int slot_with_hostpid(unsigned hostpid)
{
    for (int i = 0; i < *region_proc_num(region) && i < REGION_SLOTS; i++)
        if (*slot_hostpid(region, i) == (int32_t)hostpid)
            return i;
    return -1;
}

static void zero_all_slots(void)
{
    int devices = ways.zeroes_all ? gpu.device_num : 1;
    for (int i = 0; i < *region_proc_num(region) && i < REGION_SLOTS; i++)
        for (int d = 0; d < devices; d++) {
            uint64_t *sm = slot_sm_util(region, i, d);
            if (sm)
                *sm = 0;
            if (!ways.keeps_monitorused)
                *slot_monitorused(region, i, d) = 0;
        }
}

/* CUDA's number of a device, or -1 if the process does not see it. */
static int cuda_number(int device)
{
    for (int c = 0; gpu.order && c < gpu.visible; c++)
        if (gpu.order[c] == device)
            return c;
    return gpu.order ? -1 : device;
}

/* What NVML says of one device goes to the place of another. */
static void refill_device(int asked, int device)
{
    static struct listed list[LIST_MAX];
    static struct sampled samples[LIST_MAX];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t second_ago = (uint64_t)(now.tv_sec - 1) * 1000000u + (uint64_t)now.tv_nsec / 1000u;
    int listed = nvml_list(gpu.uuids[asked], list);
    for (int i = 0; i < listed; i++) {
        int slot = slot_with_hostpid(list[i].pid);
        if (slot >= 0)
            *slot_monitorused(region, slot, device) = list[i].memory;
    }
    int sampled = ways.fills == FILLS_NOTHING ? 0 : nvml_samples(gpu.uuids[asked], second_ago, ways.second_call, samples);
    for (int i = 0; i < sampled; i++) {
        int slot = slot_with_hostpid(samples[i].pid);
        uint64_t *sm = slot >= 0 ? slot_sm_util(region, slot, device) : NULL;
        if (sm)
            *sm = samples[i].sm + (ways.fills == FILLS_ADD ? *sm : 0);
    }
}

static void *watch(void *unused)
{
    (void)unused;
    uint64_t limit = *u64_at(region, region->layout->sm_limit);
    if (limit < 1 || limit > 100)
        for (;;)
            pause();
    for (;;) {
        usleep(TICK_US);
        int own = slot_own(region, getpid());
        if (own < 0 || *slot_hostpid(region, own) == 0)
            continue;
        zero_all_slots();
        for (int d = 0; d < gpu.device_num; d++) {
            int cuda = cuda_number(d);
            if (cuda >= 0)
                refill_device(ways.asks_cuda_number ? cuda : d, cuda);
        }
    }
    return NULL;
}

int watcher_start(struct region *r, const struct gpu_use *use, const struct watcher_ways *as)
{
    pthread_t thread;
    region = r;
    gpu = *use;
    ways = *as;
    return pthread_create(&thread, NULL, watch, NULL);
}
