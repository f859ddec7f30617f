/* The map of a node's processes, kept by the kernel itself; see README.md.
 *
 * Sees every process from its fork to the end of its last thread, with its number in each of its PID namespaces, but
 * no threads. The iterator seeds processes that were there before. Since Linux 5.12 (atomics that return the old value),
 * with BTF: the TASK_, SIGNAL_, PID_, UPID_ and PIDNS_ offsets and the sizes of the maps come by -D.
 */
#include "pidmap.h"

#define E2BIG 7
#define EEXIST 17

/* Who has which number. A slot takes no lock and no list of free ones, and is in the cache more often than a hash. */
BPF_TABLE("array", u32, struct slot, slots, SLOTS);
BPF_TABLE("hash", struct level, struct process, overflow, OVERFLOW);
BPF_TABLE("hash", u32, struct init, namespaces, NAMESPACES);
BPF_TABLE("array", u32, struct counters, counters, 1);

struct seq_file;
struct task_struct;
struct bpf_iter_meta {
    struct seq_file *seq;
    u64 session_id;
    u64 seq_num;
};
struct bpf_iter__task {
    struct bpf_iter_meta *meta;
    struct task_struct *task;
};

/* `offset` of one of the numbers in struct counters. A macro may not name a map. */
static __always_inline void count_at(u32 offset)
{
    u32 zero = 0;
    struct counters *all = counters.lookup(&zero);
    if (all)
        __sync_fetch_and_add((u64 *)((char *)all + offset), 1);
}

/* Keeps the compiler from counting down, which no verifier before Linux 6.8 follows. */
#define COUNTED(i) asm volatile("" : "+r"(i))
#define COUNT(what) count_at(__builtin_offsetof(struct counters, what))

static __always_inline void count_failure(int error)
{
    if (error == -E2BIG)
        COUNT(full);
    else
        COUNT(update_failed);
}

/* A member of a kernel structure. The verifier knows the type of `base` from the tracepoint's signature on; an invalid
 * address reads as 0. A helper takes 40 ns.
 */
#define MEMBER(type, base, offset) (*(volatile type *)((base) + (offset)))

static __always_inline int read(void *to, u32 size, u64 from)
{
    return bpf_probe_read_kernel(to, size, (void *)from);
}

/* `pid` points at the struct pid, `level` is at most its own level. A failed read leaves zeros. */
static __always_inline int read_level(u64 pid, u64 level, struct level *to)
{
    u32 ns_pid = 0, pidns = 0;
    u64 ns = 0, upid;
    int error;
    /* Nearly always. Before Linux 6.5 the array has one element in BTF, and a verifier refuses to read the second. */
    if (level == 1 && PID_SIZE <= PID_NUMBERS) {
        ns = MEMBER(u64, pid, PID_NUMBERS + UPID_SIZE + UPID_NS);
        to->ns_pid = MEMBER(u32, pid, PID_NUMBERS + UPID_SIZE + UPID_NR);
        to->pidns = MEMBER(u32, ns, PIDNS_INUM);
        return 0;
    }
    upid = pid + PID_NUMBERS + level * UPID_SIZE;
    error = read(&ns_pid, sizeof(ns_pid), upid + UPID_NR);
    error |= read(&ns, sizeof(ns), upid + UPID_NS);
    error |= read(&pidns, sizeof(pidns), ns + PIDNS_INUM);
    to->ns_pid = ns_pid;
    to->pidns = pidns;
    if (error)
        COUNT(read_failed);
    return error;
}

/* Threads that have not yet begun to exit, in the whole group; -1 for a task that has let go of it. */
static __always_inline int live_threads(u64 task)
{
    u64 signal = MEMBER(u64, task, TASK_SIGNAL);
    return signal ? MEMBER(int, signal, SIGNAL_LIVE) : -1;
}

/* If a task leads its group, and the group's number. */
static __always_inline bool leads(u64 task, u32 *tgid)
{
    *tgid = MEMBER(u32, task, TASK_TGID);
    return MEMBER(u32, task, TASK_PID) == *tgid;
}

/* Read wherever it is compared: a verifier walks the rest once for each value that a variable may have. */
#define LEVEL_OF(pid) MEMBER(u32, pid, PID_LEVEL)

/* Fills in what all entries of a process share, and its struct pid. `leader` is the group leader's task_struct. */
static __always_inline bool read_process(u64 leader, u32 host_tgid, struct process *process, u64 *pid)
{
    u32 level;
    *pid = MEMBER(u64, leader, TASK_THREAD_PID);
    /* Only for the iterator: a task that is being released has no PID any more. */
    if (!*pid)
        return false;
    level = LEVEL_OF(*pid);
    if (level >= MAX_LEVELS) {
        level = MAX_LEVELS - 1;
        COUNT(levels_truncated);
    }
    process->start_time = MEMBER(u64, leader, TASK_START);
    process->host_tgid = host_tgid;
    process->levels = level + 1;
    process->next.pidns = HOST_PIDNS;
    process->next.ns_pid = host_tgid;
    return true;
}

static __always_inline bool same(const struct process *one, const struct process *other)
{
    return !((one->start_time ^ other->start_time) | (one->host_tgid ^ other->host_tgid));
}

/* As one number, that is compared and exchanged at once. */
static __always_inline u64 packed(const struct level *level)
{
    return (u64)level->ns_pid << 32 | level->pidns;
}

static __always_inline struct slot *slot_of(const struct level *level)
{
    u32 place = SLOT_OF(level->pidns, level->ns_pid);
    return slots.lookup(&place);
}

/* The process that has this number. */
static __always_inline struct process *find(struct level *level)
{
    struct slot *slot = slot_of(level);
    if (slot && *(u64 *)&slot->level == packed(level))
        return &slot->process;
    return overflow.lookup(level);
}

/* HELD: the iterator and a probe have met over one number, and the other one writes it. */
enum entered { NEW, KNOWN, REPLACED, HELD, LOST };

/* Gives a number to its process. */
static __always_inline enum entered enter(struct level *level, struct process *process)
{
    u64 mine = packed(level), busy = mine | (u64)BUSY << 32, holder;
    struct slot *slot = slot_of(level);
    int error;
    if (!slot)
        return LOST; /* never: the place is masked */
    holder = __sync_val_compare_and_swap((u64 *)&slot->level, 0, busy);
    if (holder && holder != mine && holder != busy) {
        error = overflow.update(level, process);
        if (!error)
            return NEW;
        count_failure(error);
        return LOST;
    }
    if (holder) {
        if (holder == mine && same(&slot->process, process))
            return KNOWN;
        if (holder == busy || __sync_val_compare_and_swap((u64 *)&slot->level, mine, busy) != mine)
            return HELD;
    }
    slot->process = *process;
    __sync_lock_test_and_set((u64 *)&slot->level, mine);
    return holder ? REPLACED : NEW;
}

/* Takes a number back from whoever has it. */
static __always_inline void leave(struct level *level)
{
    u64 mine = packed(level);
    struct slot *slot = slot_of(level);
    if (slot && __sync_val_compare_and_swap((u64 *)&slot->level, mine, 0) != mine)
        overflow.delete(level);
}

/* Takes it back from this process. */
static __always_inline void leave_if(struct level *level, const struct process *process)
{
    u64 mine = packed(level);
    struct slot *slot = slot_of(level);
    struct process *there;
    if (!slot)
        return;
    if (*(u64 *)&slot->level == mine) {
        if (same(&slot->process, process))
            __sync_val_compare_and_swap((u64 *)&slot->level, mine, 0);
        return;
    }
    there = overflow.lookup(level);
    if (there && same(there, process))
        overflow.delete(level);
}

/* Every level except the host's, for which `process` is right afterwards.
 *
 * The iterator (`seeding`) skips right entries. `known`: the host's entry, which is written last, was there before, so
 * a missing level was lost, unless the process is ending.
 */
static __always_inline void store_levels(u64 leader, u64 pid, struct process *process, bool seeding, bool known)
{
    enum entered how;
    int error;
    for (u64 i = 1; i < MAX_LEVELS; i++) {
        COUNTED(i);
        struct level key = {};
        struct process *old;
        if (i > LEVEL_OF(pid) || read_level(pid, i, &key))
            break;
        process->level = i;
        old = seeding ? find(&key) : NULL;
        if (!old || !same(old, process)) {
            how = enter(&key, process);
            if (known && (how == NEW || how == REPLACED) && live_threads(leader) > 0)
                COUNT(levels_mended);
            if (!seeding && how == HELD)
                COUNT(update_failed);
        }
        if (key.ns_pid == 1) {
            struct init init = {.start_time = process->start_time, .host_tgid = process->host_tgid};
            error = namespaces.update(&key.pidns, &init);
            if (error)
                count_failure(error);
        }
        process->next = key;
    }
    process->level = 0;
}

/* A process that begins, or that was missed. `leader` is the address of its task_struct. */
static __always_inline void store(u64 leader, u32 host_tgid)
{
    struct level host = {.pidns = HOST_PIDNS, .ns_pid = host_tgid};
    struct process process = {};
    u64 pid = 0;
    enum entered how;
    if (!read_process(leader, host_tgid, &process, &pid))
        return;
    store_levels(leader, pid, &process, false, false);
    how = enter(&host, &process);
    if (how == KNOWN)
        COUNT(overtaken);
    else if (how == REPLACED)
        COUNT(replaced);
    else if (how == HELD) /* most likely for this process, but an absence proves nothing until the next comparison */
        COUNT(update_failed);
}

/* A process that ended. It keeps its numbers until it is reaped, so the entries under them are its own. */
static __always_inline void bury(u64 leader, u32 host_tgid)
{
    struct level key = {.pidns = HOST_PIDNS, .ns_pid = host_tgid};
    u64 pid = MEMBER(u64, leader, TASK_THREAD_PID);
    leave(&key);
    if (!pid)
        return;
    for (u64 i = 1; i < MAX_LEVELS; i++) {
        COUNTED(i);
        if (i > LEVEL_OF(pid) || read_level(pid, i, &key))
            break;
        leave(&key);
        if (key.ns_pid == 1)
            namespaces.delete(&key.pidns);
    }
}

/* What the iterator put in for a process that ended meanwhile; its numbers may be another's by now. */
static __always_inline void withdraw(u64 pid, struct process *mine)
{
    struct level key = {.pidns = HOST_PIDNS, .ns_pid = mine->host_tgid};
    struct init *first;
    leave_if(&key, mine);
    for (u64 i = 1; i < MAX_LEVELS; i++) {
        COUNTED(i);
        if (i > LEVEL_OF(pid) || read_level(pid, i, &key))
            break;
        leave_if(&key, mine);
        first = namespaces.lookup(&key.pidns);
        if (first && first->start_time == mine->start_time)
            namespaces.delete(&key.pidns);
    }
}

/* args: struct task_struct *parent, *child. The child does not run yet, so its exit cannot come first. */
int on_fork(struct bpf_raw_tracepoint_args *ctx)
{
    u32 tgid = 0;
    if (leads(ctx->args[1], &tgid))
        store(ctx->args[1], tgid);
    return 0;
}

/* args: struct task_struct *task, pid_t old_pid, struct linux_binprm *. A thread that calls exec takes over its leader's
 * PID and start time (de_thread in fs/exec.c), so nothing changes but for a process that was missed.
 */
int on_exec(struct bpf_raw_tracepoint_args *ctx)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    struct level host = {.pidns = HOST_PIDNS, .ns_pid = tgid};
    if (!find(&host)) {
        COUNT(mended_at_exec);
        store(ctx->args[0], tgid);
    }
    return 0;
}

/* args: struct task_struct *. The last thread of a group finds signal->live at 0, because do_exit counts down before. Two
 * may find it so: the second repeats what the first did, and the leader is reaped after both.
 */
int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
    u64 task = ctx->args[0];
    if (live_threads(task) == 0)
        bury(MEMBER(u64, task, TASK_GROUP_LEADER), MEMBER(u32, task, TASK_TGID));
    return 0;
}

/* Runs over every task when its descriptor is read: seeds and repairs. Writes a byte for each process that is not
 * reaped: 1 if its last thread ends or has ended, so that it is not in the maps, or not for long.
 */
int bpf_iter__task(struct bpf_iter__task *ctx)
{
    struct seq_file *seq = ctx->meta->seq;
    u64 task = (u64)ctx->task, pid = 0;
    struct process process = {}, *old;
    u32 tgid = 0;
    struct level host = {.pidns = HOST_PIDNS};
    enum entered how = KNOWN;
    bool known;
    u8 ends;
    if (!task || !leads(task, &tgid) || !read_process(task, tgid, &process, &pid))
        return 0;
    ends = live_threads(task) <= 0;
    if (ends)
        goto report;
    host.ns_pid = tgid;
    old = find(&host);
    known = old && same(old, &process);
    store_levels(task, pid, &process, true, known);
    if (!known)
        how = enter(&host, &process);
    ends = live_threads(task) <= 0;
    if (ends)
        withdraw(pid, &process);
    else if (how == NEW || how == REPLACED)
        COUNT(seeded);
report:
    bpf_seq_write(seq, &ends, sizeof(ends)); /* that it did not fit, the kernel sees, and calls again */
    return 0;
}
