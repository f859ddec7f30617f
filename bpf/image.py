"""Cache of the compiled program: the next start needs neither BCC nor LLVM, and 12 KiB instead of 100 MiB.

A program serves the same source, sizes, offsets and kernel only. Root loads it, so no other user may write it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct

TYPE_CHECKING = False  # typing takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from obstacles import Kernel

NAME = "bpf-program"
_FORMAT = 2
_MOST_BYTES = 1 << 20
# enum bpf_cmd, bpf_prog_type and bpf_attach_type in include/uapi/linux/bpf.h
_MAP_CREATE, _PROG_LOAD, _RAW_TRACEPOINT_OPEN, _LINK_CREATE = 0, 5, 17, 28
_TRACING, _TRACE_RAW_TP, _TRACE_ITER = 26, 23, 28
_SIZES = ("map_type", "key_size", "value_size", "max_entries", "map_flags")
_LOAD_64, _PSEUDO_MAP_FD = 0x18, 1
_INSTRUCTION = struct.Struct("=BBhi")
_LOG_SIZE = 1 << 22  # large: older kernels cut off the log's end, which has the error


class ImageError(Exception):
    """Unusable program; ``str()`` gives the reason."""


class Refused(ImageError):
    """The kernel's refusal of a part: error number, and the verifier's words about a program."""

    def __init__(self, what: str, code: int, log: str = "") -> None:
        super().__init__(f"the kernel does not take {what}: {os.strerror(code)}")
        self.what, self.code, self.log = what, code, log


def fingerprint(sources: str, constants: dict[str, int]) -> str:
    """Hash everything that a program depends on."""
    digest = hashlib.sha256(repr((_FORMAT, os.uname()[2:], sorted(constants.items()))).encode())
    for directory, below, names in os.walk(sources):
        below.sort()
        for name in sorted(names):
            if name.endswith((".c", ".h")):
                with open(os.path.join(directory, name), "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()


def image_of(program: Any, maps: Iterable[str], functions: dict[str, int], iterator: str) -> dict[str, Any]:
    """Describe BCC's result. ``functions`` maps names to BTF ids of hooks."""
    image: list[dict[str, int | str]] = []
    places: dict[int, int] = {}
    for name in maps:
        fd = program[name.encode()].map_fd
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            stated = dict(line.split(":", 1) for line in file)
        places[fd] = len(image)
        image.append({"name": name, **{key: int(stated[key], 0) for key in _SIZES}})
    programs = []
    for name, btf_id in functions.items():
        code = bytearray(program.dump_func(name.encode()))
        uses = []
        for at in range(0, len(code), _INSTRUCTION.size):
            operation, registers, _, value = _INSTRUCTION.unpack_from(code, at)
            if operation == _LOAD_64 and registers >> 4 == _PSEUDO_MAP_FD:
                uses.append((at, places[value]))
                struct.pack_into("=i", code, at + 4, 0)
        attach_type = _TRACE_ITER if name == iterator else _TRACE_RAW_TP
        programs.append(
            {"name": name, "attach_type": attach_type, "btf_id": btf_id, "code": code.hex(), "maps": uses}
        )
    return {"maps": image, "programs": programs}


def save(directory: str, mark: str, image: dict[str, Any]) -> None:
    """Keep the program for the next start. Raises OSError or `ImageError`."""
    with _opened(directory) as where:
        new = f".{NAME}.{os.getpid()}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=where)
        try:
            with os.fdopen(fd, "w") as file:
                json.dump({"mark": mark, "image": image}, file)
            os.rename(new, NAME, src_dir_fd=where, dst_dir_fd=where)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=where)
            raise


def find(directory: str, mark: str) -> dict[str, Any]:
    """Kept program with this fingerprint. Raises `ImageError`."""
    try:
        with _opened(directory) as where:
            fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise ImageError("it is no file of its own")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ImageError("it is not only ours")
            kept = json.loads(file.read(_MOST_BYTES))
        if kept["mark"] != mark:
            raise ImageError("it was made of something else")
        image = kept["image"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImageError(f"{type(error).__name__}: {error}") from None
    if not isinstance(image, dict):
        raise ImageError("it is no program")
    return image


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise ImageError("others may write to its directory")
        yield fd
    finally:
        os.close(fd)


class Loaded:
    """Descriptors of maps, programs and links by name."""

    def __init__(self, kernel: Kernel, image: dict[str, Any]) -> None:
        """Load all, or raise `ImageError`."""
        self._kernel = kernel
        self.maps: dict[str, int] = {}
        self.programs: dict[str, int] = {}
        self.links: list[int] = []
        try:
            for entry in image["maps"]:
                self.maps[entry["name"]] = self._map(entry)
            for entry in image["programs"]:
                self.programs[entry["name"]] = self._program(entry)
            for entry in image["programs"]:
                self.links.append(self._link(self.programs[entry["name"]], entry))
        except (Refused, ValueError, KeyError, TypeError, struct.error) as error:
            self.close()
            if isinstance(error, Refused):
                raise
            raise ImageError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        for fd in (*self.links, *self.programs.values(), *self.maps.values()):
            os.close(fd)

    def _map(self, each: dict[str, Any]) -> int:
        sizes, name = (each[key] for key in _SIZES), each["name"].encode()[:15]
        return self._call(_MAP_CREATE, struct.pack("=5III16sI", *sizes, 0, 0, name, 0), each["name"])

    def _program(self, each: dict[str, Any]) -> int:
        import ctypes

        code = bytearray.fromhex(each["code"])
        descriptors = list(self.maps.values())
        for at, place in each["maps"]:
            struct.pack_into("=i", code, at + 4, descriptors[place])
        instructions = ctypes.create_string_buffer(bytes(code), len(code))
        licence = ctypes.create_string_buffer(b"GPL")

        def attributes(log_size: int, log: int) -> bytes:
            return struct.pack(
                "=IIQQIIQII16sIIIIQIIQII",
                *(_TRACING, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(licence)),
                *(1 if log_size else 0, log_size, log, 0, 0),
                *(each["name"].encode()[:15], 0, each["attach_type"]),
                *(0, 0, 0, 0, 0, 0, 0, each["btf_id"]),
            )

        try:
            return self._call(_PROG_LOAD, attributes(0, 0), each["name"])
        except Refused as refused:
            log = ctypes.create_string_buffer(_LOG_SIZE)
            fd = self._kernel.call(
                _PROG_LOAD, again := attributes(_LOG_SIZE, ctypes.addressof(log)), len(again)
            )
            if fd >= 0:  # the kernel lacked memory at first, or was interrupted
                os.close(fd)
            raise Refused(each["name"], refused.code, log.value.decode("utf-8", "replace")) from None

    def _link(self, program: int, each: dict[str, Any]) -> int:
        if each["attach_type"] == _TRACE_ITER:
            return self._call(_LINK_CREATE, struct.pack("=IIII", program, 0, _TRACE_ITER, 0), "the iterator")
        return self._call(_RAW_TRACEPOINT_OPEN, struct.pack("=QII", 0, program, 0), f"{each['name']}'s link")

    def _call(self, command: int, attributes: bytes, what: str) -> int:
        fd = self._kernel.call(command, attributes, len(attributes))
        if fd < 0:
            raise Refused(what, -fd)
        os.set_inheritable(fd, False)
        return fd
