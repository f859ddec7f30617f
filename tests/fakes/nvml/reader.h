/*
 * What reads the state file: the stand-in for libnvidia-ml.so.1 (nvml.c) and the simulated resource manager under
 * NVIDIA's own (../rm/rm.c). Before it: `static const struct standin_state *state`.
 */
#ifndef STANDIN_READER_H
#define STANDIN_READER_H

#define INITIAL_PIDNS 0xEFFFFFFCu
#define RING 72  /* places for the last periods of a device */
#define UNSEEN 0 /* NVIDIA's library leaves this place out */

static uint64_t read_begin(void)
{
    for (int spins = 0;; spins++) {
        uint64_t seq = __atomic_load_n(&state->seq, __ATOMIC_ACQUIRE);
        if (!(seq & 1))
            return seq;
        if (spins > 100)
            usleep(50);
        else
            sched_yield();
    }
}

static int read_retry(uint64_t seq)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&state->seq, __ATOMIC_RELAXED) != seq;
}

static inline const struct standin_state *map_state(void)
{
    const char *path = getenv("NVML_STANDIN_STATE");
    struct stat st;
    if (!path)
        return NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) == 0 && st.st_size == (off_t)sizeof(struct standin_state))
        map = mmap(NULL, sizeof(struct standin_state), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return NULL;
    const struct standin_state *s = map;
    if (s->magic != STANDIN_MAGIC || s->version != STANDIN_VERSION || s->size != sizeof(*s)) {
        munmap(map, sizeof(struct standin_state));
        return NULL;
    }
    return s;
}

static unsigned caller_pidns(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (unsigned)st.st_ino : 0;
}

/* "535.113.01" as one comparable number, 0 when it is not a version. */
static unsigned long version_number(const char *text)
{
    unsigned major = 0, minor = 0, patch = 0;
    if (sscanf(text, "%u.%u.%u", &major, &minor, &patch) < 1)
        return 0;
    return major * 1000000ul + minor * 1000ul + patch;
}

static int driver_row(const char *driver_version)
{
    unsigned long v = version_number(driver_version);
    if (v < 535113001ul)
        return 1;
    if (v < 565000000ul)
        return 2;
    return v < 570086015ul ? 3 : 4;
}

static int sees_host(unsigned pidns)
{
    return pidns == INITIAL_PIDNS || pidns == state->driver_pidns;
}

static unsigned translate(const struct standin_chain *chain, unsigned pidns)
{
    unsigned depth = chain->depth < STANDIN_LEVELS ? chain->depth : STANDIN_LEVELS;
    for (unsigned i = 0; i < depth; i++)
        if (chain->level[i].pidns == pidns)
            return (unsigned)chain->level[i].nr;
    return (unsigned)chain->level[0].nr;
}

/* ---- a device's ring of periods ----------------------------------------------------------------------------- */

struct period {
    uint64_t time_us; /* when it ended; 0: an empty place */
    unsigned sm, mem, enc, dec; /* of the device, per cent */
    int busy; /* a process was active */
};

static inline unsigned at_most_100(unsigned load)
{
    return load < 100 ? load : 100;
}

/* Calls `visit` with every sample of a device's last periods, and fills the ring. Within read_begin and read_retry. */
static inline void read_ring(unsigned device, struct period ring[RING],
                             void (*visit)(const struct standin_sample *s, unsigned place, void *data), void *data)
{
    uint64_t total = state->samples_total, first = total > STANDIN_SAMPLES ? total - STANDIN_SAMPLES : 0;
    unsigned newest = 0;
    memset(ring, 0, RING * sizeof *ring);
    for (uint64_t k = first; k < total; k++)
        if (state->samples[k % STANDIN_SAMPLES].device == device)
            newest = state->samples[k % STANDIN_SAMPLES].period;
    for (uint64_t k = first; k < total; k++) {
        const struct standin_sample *s = &state->samples[k % STANDIN_SAMPLES];
        if (s->device != device || s->period + RING <= newest)
            continue;
        struct period *p = &ring[s->period % RING];
        p->time_us = s->time_us;
        p->sm += s->sm;
        p->mem = at_most_100(p->mem + s->mem);
        p->enc = at_most_100(p->enc + s->enc);
        p->dec = at_most_100(p->dec + s->dec);
        p->busy |= s->chain.depth != 0;
        if (visit && s->chain.depth)
            visit(s, s->period % RING, data);
    }
}

#endif
