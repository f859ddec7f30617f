/* The map of a node's processes, kept by the kernel itself; see README.md.
 *
 * Since Linux 5.8, with BTF: the TASK_, SIGNAL_, PID_, UPID_ and PIDNS_ offsets and the sizes of the maps come by -D.
 */
#include "pidmap.h"

#define ENOENT 2
#define E2BIG 7
#define EEXIST 17
#define TASK_NEW 0x800 /* include/linux/sched.h: from copy_process() to wake_up_new_task() */

BPF_TABLE("hash", struct level, struct process, processes, LEVELS);
BPF_TABLE("hash", u32, struct init, namespaces, NAMESPACES);
BPF_TABLE("array", u32, struct counters, counters, 1);

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

#define COUNT(what) count_at(__builtin_offsetof(struct counters, what))

/* Keeps the compiler from counting down, which no verifier before Linux 6.8 follows. */
#define COUNTED(i) asm volatile("" : "+r"(i))

static __always_inline void count_failure(int error)
{
    if (error == -E2BIG)
        COUNT(full);
    else if (error)
        COUNT(update_failed);
}

/* A member of a kernel structure. The verifier knows the type of `base` from the tracepoint's signature on; an invalid
 * address reads as 0. A helper takes 40 ns.
 */
#define MEMBER(type, base, offset) (*(volatile type *)((base) + (offset)))

/* Read wherever it is compared: a verifier walks the rest once for each value that a variable may have. */
#define LEVEL_OF(pid) MEMBER(u32, pid, PID_LEVEL)

/* `pid` points at the struct pid, `level` is at most its own level. A failed read leaves zeros. */
static __always_inline int read_level(u64 pid, u64 level, struct level *to)
{
    u32 ns_pid = 0, pidns = 0;
    u64 ns = 0, upid;
    int error;
    /* Nearly always level 1. Before Linux 6.5 BTF gives the array one element, and a verifier refuses the second. */
    if (level == 1 && PID_SIZE <= PID_NUMBERS) {
        ns = MEMBER(u64, pid, PID_NUMBERS + UPID_SIZE + UPID_NS);
        to->ns_pid = MEMBER(u32, pid, PID_NUMBERS + UPID_SIZE + UPID_NR);
        to->pidns = MEMBER(u32, ns, PIDNS_INUM);
        return 0;
    }
    upid = pid + PID_NUMBERS + level * UPID_SIZE;
    error = bpf_probe_read_kernel(&ns_pid, sizeof(ns_pid), (void *)(upid + UPID_NR));
    error |= bpf_probe_read_kernel(&ns, sizeof(ns), (void *)(upid + UPID_NS));
    error |= bpf_probe_read_kernel(&pidns, sizeof(pidns), (void *)(ns + PIDNS_INUM));
    to->ns_pid = ns_pid;
    to->pidns = pidns;
    if (error)
        COUNT(read_failed);
    return error;
}

/* Threads that have not yet begun to exit, in the whole group; 0 for a task that has let go of it. */
#define LIVE_THREADS(signal) MEMBER(int, signal, SIGNAL_LIVE)

/* The struct pid of a group's leader; 0 for another thread, and for the iterator's task that is being released. Not by
 * task_struct.pid: a thread that calls exec swaps both with its leader, one after the other.
 */
static __always_inline u64 leader_pid(u64 task, u32 *tgid)
{
    u64 pid = MEMBER(u64, task, TASK_THREAD_PID);
    *tgid = MEMBER(u32, task, TASK_TGID);
    return pid && MEMBER(u32, pid, PID_NUMBERS + UPID_NR) == *tgid ? pid : 0;
}

static __always_inline bool same(const struct process *one, const struct process *other)
{
    return !((one->start_time ^ other->start_time) | (one->host_tgid ^ other->host_tgid));
}

/* Enters a process under one of its PIDs; true if it was missing. A right entry isn't updated, which would hide it from
 * a reader for a moment. An entry of another process is left from a missed exit, or from a walk that is about to remove
 * it and may remove this one: that is counted, and until the next walk an absent entry proves nothing.
 */
static __always_inline bool enter(struct level *level, struct process *process)
{
    int error = processes.insert(level, process);
    if (error == -EEXIST) {
        struct process *there = processes.lookup(level);
        if (there && same(there, process))
            return false;
        COUNT(update_failed);
        error = processes.update(level, process);
    }
    count_failure(error);
    return !error;
}

/* Removes the entry of a PID; with `mine` only that process's. */
static __always_inline void leave(struct level *level, const struct process *mine)
{
    int error;
    if (mine) {
        struct process *there = processes.lookup(level);
        if (!there || !same(there, mine))
            return;
    }
    error = processes.delete(level);
    if (error != -ENOENT)
        count_failure(error);
}

/* Enters a process under each of its PIDs, the host's last; true if one was missing. `leader` is the address of its
 * task_struct. Leaves in `process` what all of its entries share.
 */
static __always_inline bool store(u64 leader, u64 pid, u32 host_tgid, struct process *process)
{
    struct level host = {.pidns = HOST_PIDNS, .ns_pid = host_tgid};
    u32 deepest = LEVEL_OF(pid);
    bool fresh = false;
    if (deepest >= MAX_LEVELS) {
        deepest = MAX_LEVELS - 1;
        COUNT(levels_truncated);
    }
    process->start_time = MEMBER(u64, leader, TASK_START);
    process->host_tgid = host_tgid;
    process->levels = deepest + 1;
    process->next = host;
    for (u64 i = 1; i < MAX_LEVELS; i++) {
        COUNTED(i);
        struct level key = {};
        if (i > LEVEL_OF(pid) || read_level(pid, i, &key))
            break;
        process->level = i;
        fresh |= enter(&key, process);
        if (key.ns_pid == 1) {
            struct init init = {.start_time = process->start_time, .host_tgid = host_tgid};
            count_failure(namespaces.update(&key.pidns, &init));
        }
        process->next = key;
    }
    process->level = 0;
    return fresh | enter(&host, process);
}

/* Removes a process that ended. It keeps its PIDs until it is reaped, so all entries under them are its own. Only the
 * iterator's process (`mine`) may have been reaped meanwhile.
 */
static __always_inline void bury(u64 pid, u32 host_tgid, const struct process *mine)
{
    struct level key = {.pidns = HOST_PIDNS, .ns_pid = host_tgid};
    leave(&key, mine);
    if (!pid)
        return;
    for (u64 i = 1; i < MAX_LEVELS; i++) {
        COUNTED(i);
        if (i > LEVEL_OF(pid) || read_level(pid, i, &key))
            break;
        leave(&key, mine);
        struct init *first = mine ? namespaces.lookup(&key.pidns) : NULL;
        if (key.ns_pid == 1 && (!mine || (first && first->start_time == mine->start_time)))
            namespaces.delete(&key.pidns);
    }
}

/* args: struct task_struct *parent, *child. The child does not run yet, so its exit cannot come first. */
int on_fork(struct bpf_raw_tracepoint_args *ctx)
{
    struct process process = {};
    u32 tgid = 0;
    u64 pid = leader_pid(ctx->args[1], &tgid);
    if (pid)
        store(ctx->args[1], pid, tgid, &process);
    return 0;
}

/* args: struct task_struct *task, pid_t old_pid, struct linux_binprm *. A thread that calls exec takes over its
 * leader's PID and start time (de_thread in fs/exec.c), so only a process that was missed changes the map.
 */
int on_exec(struct bpf_raw_tracepoint_args *ctx)
{
    struct process process = {};
    struct level host = {.pidns = HOST_PIDNS};
    u64 pid = leader_pid(ctx->args[0], &host.ns_pid);
    if (pid && !processes.lookup(&host)) {
        COUNT(mended_at_exec);
        store(ctx->args[0], pid, host.ns_pid, &process);
    }
    return 0;
}

/* args: struct task_struct *. The last thread of a group finds signal->live at 0, because do_exit counts down before.
 * If two threads find that, the second repeats the first one's work, and the leader is reaped after both.
 */
int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
    u64 task = ctx->args[0];
    if (LIVE_THREADS(MEMBER(u64, task, TASK_SIGNAL)) == 0) {
        u64 leader = MEMBER(u64, task, TASK_GROUP_LEADER);
        bury(MEMBER(u64, leader, TASK_THREAD_PID), MEMBER(u32, task, TASK_TGID), NULL);
    }
    return 0;
}

/* Runs over every task when its descriptor is read: seeds and repairs. Writes a byte for each process that is not
 * reaped: 1 if its last thread is ending or has ended, so the maps don't have the process, or soon won't.
 * `signal` is read once: a leader whose thread calls exec lets go of it, and the process goes on.
 */
int bpf_iter__task(struct bpf_iter__task *ctx)
{
    struct seq_file *seq = ctx->meta->seq;
    u64 task = (u64)ctx->task, pid, signal;
    struct process process = {};
    u32 tgid = 0;
    u8 ends;
    if (!task || !(pid = leader_pid(task, &tgid)))
        return 0;
    signal = MEMBER(u64, task, TASK_SIGNAL);
    ends = LIVE_THREADS(signal) <= 0;
    if (!ends) {
        bool fresh = store(task, pid, tgid, &process);
        ends = LIVE_THREADS(signal) <= 0;
        if (ends)
            bury(pid, tgid, &process);
        else if (fresh && !(MEMBER(u32, task, TASK_STATE) & TASK_NEW)) /* the fork event of a new one is under way */
            COUNT(seeded);
    }
    bpf_seq_write(seq, &ends, sizeof(ends)); /* if it doesn't fit, the kernel notices and calls again */
    return 0;
}
