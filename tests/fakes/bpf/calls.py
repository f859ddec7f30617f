"""Traces system calls of threads for ``tests.fakes.traced``; runs with the distribution's Python, which has bcc.

Standard input: ``watch TID`` and ``take TID``. The answer to either is a line: ``null``, or the calls that the thread
has made, as ``[number, magic, kind, path, count, number of the signal for it]``. ``ready`` comes first.
"""

import contextlib
import ctypes
import json
import os
import platform
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../../../bpf")]

from btf import Btf  # type: ignore[import-not-found]  # noqa: E402

OFFSETS = {
    "TASK_FILES": ("task_struct", "files"),
    "TASK_START": ("task_struct", "start_boottime"),
    "FILES_FDT": ("files_struct", "fdt"),
    "FDT_MAX_FDS": ("fdtable", "max_fds"),
    "FDT_FD": ("fdtable", "fd"),
    "FILE_INODE": ("file", "f_inode"),
    "INODE_SB": ("inode", "i_sb"),
    "INODE_MODE": ("inode", "i_mode"),
    "SB_MAGIC": ("super_block", "s_magic"),
}
#: Of struct pt_regs: first and second argument of a system call.
ARGUMENTS = {"x86_64": (112, 104), "aarch64": (0, 8)}


def main() -> None:
    numbers = json.loads(sys.argv[1])
    with open("/sys/kernel/btf/vmlinux", "rb") as file:
        btf = Btf(file.read())
    flags = [f"-D{name}={btf.offset(*names)}" for name, names in OFFSETS.items()]
    first, second = ARGUMENTS[platform.machine()]
    flags += [f"-DFIRST_ARGUMENT={first}", f"-DSECOND_ARGUMENT={second}", "-Wno-macro-redefined"]
    flags.append(f"-DNS_PER_TICK={1_000_000_000 // os.sysconf('SC_CLK_TCK')}")
    for name, chosen_numbers in numbers.items():
        chosen = "||".join(f"(n)=={number}" for number in chosen_numbers)
        flags.append(f"-D{name}(n)=({chosen})")
    os.environ["BCC_KERNEL_SOURCE"] = os.path.join(HERE, "../../../bpf")
    import bcc  # type: ignore[import-not-found]

    bpf = bcc.BPF(src_file=os.path.join(HERE, "calls.c"), cflags=flags)
    bpf.attach_raw_tracepoint(tp="sys_enter", fn_name="on_call")
    calls, watched = bpf["calls"], bpf["watched"]
    print("ready", flush=True)
    for line in sys.stdin:
        word, tid = line.split()
        if word == "watch":
            with contextlib.suppress(OSError):  # it has ended, and made no call that counts
                watched[ctypes.c_uint(int(tid))] = watched.Leaf(start_of(tid), 0)
            print("null", flush=True)
            continue
        found = []
        for key, count in list(calls.items()):
            if key.tid == int(tid):
                path = ("", "/proc/#", "/proc/#/task/#")[key.process] + key.path.decode("utf-8", "replace")
                found.append([key.number, key.magic, key.kind, path, count.count, count.signal])
                del calls[key]
        with contextlib.suppress(KeyError):
            del watched[ctypes.c_uint(int(tid))]
        print(json.dumps(found), flush=True)


def start_of(tid: str) -> int:
    """Start of a living thread in clock ticks, field 22 of its ``stat``. Raises `OSError`."""
    with open(f"/proc/{tid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


if __name__ == "__main__":
    main()
