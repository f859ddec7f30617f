"""Tests of the modules of ``bpf/``, which another Python runs by their paths."""

import importlib
import sys
from typing import Any

from resolver.pids.bpf_load import bpf_directory


def part(name: str) -> Any:
    sys.path.insert(0, bpf_directory())
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
