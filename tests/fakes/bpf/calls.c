/* Counts the system calls of chosen threads, by what they are about. Compiled by calls.py.
 *
 * A call about a path has that path, less /proc/<pid> and /task/<tid> at its beginning, and the file system of the directory
 * that it is relative to. A call about a descriptor has its file system and kind. For each call not seen before the thread
 * gets SIGURG: ignored, unless the process writes its stack then, to a file of tmpfs, which is not counted.
 */
#define NAME 192
#define TMPFS 0x01021994

struct call {
    u32 tid, number;
    u32 magic, kind;  /* of the descriptor: of its superblock, and S_IFMT */
    u32 process;      /* 1: below /proc/<pid>, 2: below its task/<tid> */
    char path[NAME];
};

/* Its number may be another thread's later, which has another start. */
struct thread {
    u64 start; /* clock ticks, as in /proc/<tid>/stat */
    u64 signals;
};

BPF_HASH(watched, u32, struct thread, 1024);
struct seen {
    u64 count, signal; /* number of the signal that it caused, from 1 on; or 0 */
};

BPF_HASH(calls, struct call, struct seen, 65536);
BPF_PERCPU_ARRAY(rooms, struct call, 1);

static void describe(struct call *call, int fd)
{
    char *task = (char *)bpf_get_current_task(), *files, *table, **all, *file, *inode, *block;
    u64 magic = 0;
    u32 most = 0;
    u16 mode = 0;
    if (fd < 0) {
        call->kind = 1; /* the working directory, or none */
        return;
    }
    bpf_probe_read_kernel(&files, sizeof files, task + TASK_FILES);
    bpf_probe_read_kernel(&table, sizeof table, files + FILES_FDT);
    bpf_probe_read_kernel(&most, sizeof most, table + FDT_MAX_FDS);
    if ((u32)fd >= most)
        return;
    bpf_probe_read_kernel(&all, sizeof all, table + FDT_FD);
    if (bpf_probe_read_kernel(&file, sizeof file, all + fd) || !file)
        return;
    bpf_probe_read_kernel(&inode, sizeof inode, file + FILE_INODE);
    bpf_probe_read_kernel(&block, sizeof block, inode + INODE_SB);
    bpf_probe_read_kernel(&magic, sizeof magic, block + SB_MAGIC);
    bpf_probe_read_kernel(&mode, sizeof mode, inode + INODE_MODE);
    call->magic = magic;
    call->kind = mode & 0170000;
}

static u64 after_number(u64 path)
{
    char digit[8] = {};
    int i;
    bpf_probe_read_user(digit, sizeof digit, (void *)path);
    for (i = 0; i < 8; i++)
        if (digit[i] < '0' || digit[i] > '9')
            break;
    return path + i;
}

static u64 below(struct call *call, u64 path)
{
    char start[6] = {};
    u64 rest;
    bpf_probe_read_user(start, sizeof start, (void *)path);
    if (start[0] != '/' || start[1] != 'p' || start[2] != 'r' || start[3] != 'o' || start[4] != 'c' || start[5] != '/')
        return path;
    rest = after_number(path + 6);
    if (rest == path + 6)
        return path;
    call->process = 1;
    bpf_probe_read_user(start, sizeof start, (void *)rest);
    if (start[0] != '/' || start[1] != 't' || start[2] != 'a' || start[3] != 's' || start[4] != 'k' || start[5] != '/')
        return rest;
    call->process = 2;
    return after_number(rest + 6);
}

int on_call(struct bpf_raw_tracepoint_args *ctx)
{
    u32 tid = (u32)bpf_get_current_pid_tgid(), zero = 0, number = ctx->args[1];
    u64 first, second, start = 0;
    struct seen *seen, new = {1, 0};
    struct thread *thread = watched.lookup(&tid);
    if (!thread || UNCOUNTED(number))
        return 0;
    bpf_probe_read_kernel(&start, sizeof start, (char *)bpf_get_current_task() + TASK_START);
    if (start / NS_PER_TICK != thread->start)
        return 0;
    struct call *call = rooms.lookup(&zero);
    if (!call)
        return 0;
    __builtin_memset(call, 0, sizeof *call);
    bpf_probe_read_kernel(&first, sizeof first, (void *)(ctx->args[0] + FIRST_ARGUMENT));
    bpf_probe_read_kernel(&second, sizeof second, (void *)(ctx->args[0] + SECOND_ARGUMENT));
    call->tid = tid;
    call->number = number;
    u64 path = 0;
    if (OF_PATH(number))
        path = first;
    else if (OF_BOTH(number))
        path = second;
    if (path)
        bpf_probe_read_user_str(call->path, NAME, (void *)below(call, path));
    if (OF_DESCRIPTOR(number) || (OF_BOTH(number) && call->path[0] != '/' && !call->process))
        describe(call, (int)first);
    if (call->magic == TMPFS && OF_WRITE(number))
        return 0;
    seen = calls.lookup(call);
    if (seen) {
        __sync_fetch_and_add(&seen->count, 1);
    } else {
        if (!UNSIGNALLED(number) && bpf_send_signal_thread(23) == 0) /* SIGURG */
            new.signal = ++thread->signals;
        calls.update(call, &new);
    }
    return 0;
}
