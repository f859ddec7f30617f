"""The real daemon, which notes each file and directory that its main thread opens.

One line in FILE for each::

    python tests/fakes/audited.py FILE PYTHON -m resolver run ...
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

_EVENTS = frozenset({"open", "os.listdir", "os.scandir"})


def main() -> None:
    """Become the daemon."""
    note, loop = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), threading.get_ident()

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and threading.get_ident() == loop:
            path = arguments[0]
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            os.write(note, b"%b\n" % (path if isinstance(path, bytes) else os.fsencode(str(path))))

    sys.path[0] = os.getcwd()  # as `python -m` does it
    module, sys.argv = sys.argv[4], sys.argv[4:]
    sys.addaudithook(hear)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
