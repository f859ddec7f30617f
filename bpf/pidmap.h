/* What pidmap.c and resolver/pids/bpf_map.py share: limits and the layout of every key and value.
 *
 * A test compiles this header and compares it with the Python side. Every size in it is fixed, the widest members
 * come first, padding is explicit. Times are nanoseconds since boot, suspend included (CLOCK_BOOTTIME).
 */
#pragma once

#include <linux/types.h>

/* MAX_PID_NS_LEVEL in kernel/pid_namespace.c is 32, and the initial namespace is level 0. */
#define MAX_LEVELS 33

/* PROC_PID_INIT_INO in include/linux/proc_ns.h: the initial PID namespace. */
#define HOST_PIDNS 0xEFFFFFFCU

/* The number of a process in one of its PID namespaces, the host's included. What everything is found by. */
struct level {
    __u32 pidns; /* inode */
    __u32 ns_pid;
};

/* A process by one of its levels.
 *
 * The levels of a process form a ring: the entry of the host's level names the innermost one, each other entry names
 * the next level outwards.
 */
struct process {
    __u64 start_time; /* task_struct.start_boottime of the leader */
    __u32 host_tgid;
    __u16 level; /* of this entry: 0 is the host's */
    __u16 levels; /* how many this process has */
    struct level next;
};

/* Value of `slots`. A level has one slot where it may be; if that is another's, it is in `overflow`.
 *
 * `level` is written last and cleared first, each time at once, so that no slot is ever two writers'.
 */
struct slot {
    struct level level; /* 0: free. With BUSY in ns_pid: it is being written for that level */
    struct process process;
};
/* Above every PID. */
#define BUSY 0x80000000U
/* Of SLOTS, a power of two. The numbers of a namespace are given in order, so that its slots share cache lines. */
#define SPREAD 0x9E3779B1U
#define SLOT_OF(pidns, ns_pid) (((ns_pid) + (pidns) * SPREAD) & (SLOTS - 1))

/* Value of `namespaces`, whose key is the inode of a PID namespace: the process that is PID 1 in it. */
struct init {
    __u64 start_time;
    __u32 host_tgid;
    __u32 padding;
};

/* The one value of `counters`. */
struct counters {
    __u64 full; /* a map had no room: processes are missing until a reconciliation finds room for them */
    __u64 update_failed; /* a map refused for another reason, or a probe met the iterator at the same number */
    __u64 read_failed; /* kernel memory could not be read */
    __u64 levels_truncated; /* a process in more namespaces than MAX_LEVELS */
    __u64 replaced; /* an entry of an earlier process was still there: its exit was missed */
    __u64 seeded; /* put in by the iterator */
    __u64 levels_mended; /* levels put in by the iterator for processes that it did know */
    __u64 overtaken; /* of those seeded, processes whose fork event came only then: not missed */
    __u64 mended_at_exec; /* processes first seen when they called exec */
};
