"""The ctypes twin of `nvml/state.h`: the state file that the GPU stand-in writes, the NVML stand-in reads."""

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any, Final

MAGIC: Final = 0x314C4D564E444E53
VERSION: Final = 4
LEVELS: Final = 32
DEVICES: Final = 24
MIGS: Final = 8
CALLS: Final = 24
PROCESSES: Final = 256
SAMPLES: Final = 2048
XIDS: Final = 8


class Fault(IntFlag):
    """Switches of `enum standin_fault`."""

    DRIVER_NOT_LOADED = 1
    PROCESS_UTILIZATION_UNSUPPORTED = 2
    PROCESSES_INFO_UNSUPPORTED = 4
    PID_ZERO = 8
    VGPU = 16


class Hang(IntFlag):
    """Calls that hang while their bit is set: `enum standin_call`."""

    INIT = 1
    UTILIZATION = 2


class Answer(IntEnum):
    """Calls that can be made to answer with an error: `enum standin_answer`."""

    INIT = 0
    COUNT = 1
    DRIVER_VERSION = 2
    HANDLE = 3
    ANY = 4
    UUID = 5
    NAME = 6
    MINOR = 7
    MEMORY = 8
    RATES = 9
    TEMPERATURE = 10
    POWER = 11
    ECC = 12
    MIG_MODE = 13
    MIG_DEVICES = 14
    PROCESS_LIST = 15
    MPS_LIST = 16
    UTILIZATION = 17
    OTHER = 18
    EVENTS = 19
    PERIODS = 20


_U32, _U64, _TEXT = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char * 96


def _fields(*groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Return a structure's fields in order, from types and their names."""
    return tuple((name, kind) for kind, names in groups for name in names.split())


class Level(ctypes.Structure):
    _fields_ = (("pidns", _U32), ("nr", ctypes.c_int32))


class ChainStruct(ctypes.Structure):
    _fields_ = _fields((_U32, "depth pad"), (Level * LEVELS, "level"))


class MigStruct(ctypes.Structure):
    _fields_ = _fields(
        (_TEXT, "uuid"), (_U64, "memory_total memory_used"), (_U32, "gpu_instance compute_instance")
    )


class DeviceStruct(ctypes.Structure):
    _fields_ = _fields(
        (_TEXT, "uuid name"),
        (_U64, "memory_total memory_used ecc_volatile ecc_aggregate"),
        (_U32, "minor mig_enabled lost temperature_c power_mw ecc_enabled xids_total nvlinks"),
        (_U32 * XIDS, "xids"),
        (_U32 * CALLS, "errors"),
        (MigStruct * MIGS, "migs"),
    )


class ProcessStruct(ctypes.Structure):
    _fields_ = _fields((_U32, "device mps"), (_U64, "memory"), (ChainStruct, "chain"))


class SampleStruct(ctypes.Structure):
    _fields_ = _fields((_U64, "time_us"), (_U32, "device sm mem enc dec period"), (ChainStruct, "chain"))


class StateStruct(ctypes.Structure):
    _fields_ = _fields(
        (_U64, "magic"),
        (_U32, "version size"),
        (_U64, "seq"),
        (ctypes.c_char * 80, "driver_version"),
        (_U32, "driver_pidns faults hang grow device_count process_count"),
        (_U32 * CALLS, "errors"),
        (_U64, "samples_total"),
        (DeviceStruct * DEVICES, "devices"),
        (ProcessStruct * PROCESSES, "processes"),
        (SampleStruct * SAMPLES, "samples"),
    )


# The same numbers as the static assertions at the end of state.h.
SIZES: Final = {
    ChainStruct: 264,
    MigStruct: 120,
    DeviceStruct: 1344,
    ProcessStruct: 280,
    SampleStruct: 296,
    StateStruct: 232 + 24 * 1344 + 256 * 280 + 2048 * 296,
}
for _struct, _size in SIZES.items():
    if ctypes.sizeof(_struct) != _size:
        raise AssertionError(f"{_struct.__name__} is {ctypes.sizeof(_struct)} bytes, state.h says {_size}")


class StateFile:
    """The one writer of a state file. `with state.writing() as s:` makes every change inside it one step."""

    def __init__(self, path: Path) -> None:
        """Creates the file anew under `path`; libraries that still map an older one keep that."""
        self.path = path
        self._lock = threading.RLock()
        self._fence = threading.Lock()
        self._depth = 0
        fd, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            os.ftruncate(fd, ctypes.sizeof(StateStruct))
            self._map = mmap.mmap(fd, ctypes.sizeof(StateStruct))
        finally:
            os.close(fd)
        self._struct = StateStruct.from_buffer(self._map)
        self._struct.magic = MAGIC
        self._struct.version = VERSION
        self._struct.size = ctypes.sizeof(StateStruct)
        Path(temporary).chmod(0o644)
        Path(temporary).rename(path)

    @contextmanager
    def writing(self) -> Iterator[StateStruct]:
        # Taking and leaving the lock orders the stores on weakly ordered machines, too.
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._struct.seq += 1
            try:
                yield self._struct
            finally:
                self._depth -= 1
                if self._depth == 0:
                    with self._fence:
                        self._struct.seq += 1
