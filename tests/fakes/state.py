"""The ctypes twin of `nvml/state.h`: the state file that the GPU stand-in writes, the NVML stand-in reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Final

MAGIC: Final = 0x314C4D564E444E53
VERSION: Final = 3
LEVELS: Final = 32
DEVICES: Final = 16
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
    VALUES_ABOVE_100 = 8
    PID_ZERO = 16


class Hang(IntFlag):
    """Calls that hang while their bit is set: `enum standin_call`."""

    INIT = 1
    COUNT = 2
    PROCESS_LIST = 4
    UTILIZATION = 8
    DEVICE = 16
    SHUTDOWN = 32
    EVENTS = 64


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
    DETAILS = 19
    EVENTS = 20


class Level(ctypes.Structure):
    _fields_ = (("pidns", ctypes.c_uint32), ("nr", ctypes.c_int32))


class ChainStruct(ctypes.Structure):
    _fields_ = (("depth", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("level", Level * LEVELS))


class MigStruct(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("memory_total", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
    )


class DeviceStruct(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("memory_total", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),
        ("ecc_volatile", ctypes.c_uint64),
        ("ecc_aggregate", ctypes.c_uint64),
        ("ecc_corrected", ctypes.c_uint64),
        ("energy_mj", ctypes.c_uint64),
        ("throttle", ctypes.c_uint64),
        ("minor", ctypes.c_uint32),
        ("mig_enabled", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("temperature_c", ctypes.c_uint32),
        ("power_mw", ctypes.c_uint32),
        ("ecc_enabled", ctypes.c_uint32),
        ("sm_clock_mhz", ctypes.c_uint32),
        ("memory_clock_mhz", ctypes.c_uint32),
        ("power_limit_mw", ctypes.c_uint32),
        ("pcie_generation", ctypes.c_uint32),
        ("pcie_width", ctypes.c_uint32),
        ("pcie_replays", ctypes.c_uint32),
        ("xids_total", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("xids", ctypes.c_uint32 * XIDS),
        ("errors", ctypes.c_uint32 * CALLS),
        ("migs", MigStruct * MIGS),
    )


class ProcessStruct(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint32),
        ("mps", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
        ("chain", ChainStruct),
    )


class SampleStruct(ctypes.Structure):
    _fields_ = (
        ("time_us", ctypes.c_uint64),
        ("device", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),
        ("mem", ctypes.c_uint32),
        ("enc", ctypes.c_uint32),
        ("dec", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("chain", ChainStruct),
    )


class StateStruct(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("seq", ctypes.c_uint64),
        ("driver_version", ctypes.c_char * 80),
        ("driver_pidns", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("hang", ctypes.c_uint32),
        ("grow", ctypes.c_uint32),
        ("device_count", ctypes.c_uint32),
        ("process_count", ctypes.c_uint32),
        ("errors", ctypes.c_uint32 * CALLS),
        ("samples_total", ctypes.c_uint64),
        ("devices", DeviceStruct * DEVICES),
        ("processes", ProcessStruct * PROCESSES),
        ("samples", SampleStruct * SAMPLES),
    )


# The same numbers as the static assertions at the end of state.h.
SIZES: Final = {
    ChainStruct: 264,
    MigStruct: 120,
    DeviceStruct: 1392,
    ProcessStruct: 280,
    SampleStruct: 296,
    StateStruct: 232 + 16 * 1392 + 256 * 280 + 2048 * 296,
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
