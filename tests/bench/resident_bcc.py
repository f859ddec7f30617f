"""What the daemon would weigh if it kept BCC: compiles, attaches and seeds as ``bpf/loader.py`` does, and stays.

Run by the Python that has ``bcc``, with the directory of the loader and the sizes of the maps as JSON. Says "ready",
then waits until its standard input closes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> int:
    """Load, hold, end."""
    directory, sizes = sys.argv[1], json.loads(sys.argv[2])
    sys.path.insert(0, directory)
    loader: Any = importlib.import_module("loader")
    bcc = loader.import_bcc(os.path.join(directory, "include"))
    btf, offsets = loader.read_offsets("/sys/kernel/btf/vmlinux")
    program = loader.compile_program(bcc, {**offsets, **sizes})
    made = loader.image.image_of(program, loader.MAPS, loader.hooks(btf), loader.ITERATOR)
    loader.from_image(made, loader.Clock())
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
