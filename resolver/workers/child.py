"""Start of a child: ``python -I -S child.py MODULE NAME RIGHTS PATH...``.

It dies with the daemon, has a name for ``ps``, keeps only RIGHTS (capabilities, with commas) and runs
``MODULE.main()``.
"""

import contextlib
import ctypes
import errno
import importlib
import os
import sys

#: Errors of a child without descriptors or memory. EAGAIN can mean a tenant's lease.
LACKING = errno.EMFILE, errno.ENFILE, errno.ENOMEM
#: The variable with the numbers of the descriptors that belong to the first message, with commas between.
INHERITED = "RESOLVER_INHERITED"


def inherited() -> list[int]:
    """Descriptors of the first message."""
    return [int(number) for number in os.environ.get(INHERITED, "").split(",") if number]


def main() -> int:
    """Run ``main()``; returns its exit code."""
    module, name, rights, *paths = sys.argv[1:]
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the module signal is a fifth of the slot writer
    libc.prctl(15, name.encode()[:15])  # PR_SET_NAME
    if os.getppid() != parent:
        return 1  # the daemon has ended: no answer is needed
    try:
        opened = {*map(int, os.listdir("/proc/self/fd"))}
    except OSError as error:
        sys.exit(f"/proc/self/fd cannot be read ({error.strerror}): mount -t proc proc /proc")
    for fd in opened - {0, 1, 2, *inherited()}:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(fd)  # descriptors from the daemon's start
    sys.path[:0] = paths
    from resolver.linux.capabilities import limit  # importable only from now on

    limit(frozenset(rights.split(",")) - {""})
    try:
        return int(importlib.import_module(module).main())
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the daemon was just killed: no answer is needed


if __name__ == "__main__":
    sys.exit(main())
