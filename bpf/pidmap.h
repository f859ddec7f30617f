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

/* Key of `processes`: the PID of a process in one of its PID namespaces, the host's included. */
struct level {
    __u32 pidns; /* inode */
    __u32 ns_pid;
};

/* Value of `processes`: a process by one of its levels.
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

/* Value of `namespaces`, whose key is the inode of a PID namespace: the process that is PID 1 in it. */
struct init {
    __u64 start_time;
    __u32 host_tgid;
    __u32 padding;
};

/* The one value of `counters`. */
struct counters {
    __u64 full; /* a map had no room: processes are missing until a walk finds room for them */
    __u64 update_failed; /* a map refused for another reason, or a PID was still another process's */
    __u64 read_failed; /* kernel memory could not be read */
    __u64 levels_truncated; /* a process in more namespaces than MAX_LEVELS */
    __u64 seeded; /* put in by the iterator, at least in part */
    __u64 mended_at_exec; /* processes first seen when they called exec */
};
