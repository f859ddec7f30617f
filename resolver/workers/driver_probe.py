"""Driver probe: queries NVML from inside a tenant's PID namespace.

A child for one query. It checks the processes there, drops all privileges, and forks the only visible process, which
calls NVML (docs/security.md). One JSON object each way on descriptor 0; the namespace's descriptor is inherited::

    {"pidns": inode, "uuids": [str, ...], "since": us, "nobody": bool, "seconds": float}
        -> {"seen": {uuid: [pid, ...] | null}, "nobody": bool}
         | {"refused": why}                  the namespace is unsafe
         | {"failed": why, "init": bool}     ``init``: NVML did not start

A closed socket ends the probe: without CAP_KILL the daemon can't kill another user's process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

from resolver.workers.child import inherited

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from resolver.linux.mounts import Mount
    from resolver.workers.nvml import Nvml

#: What the child may have to do: enter namespaces, read others' processes, become another user.
RIGHTS = frozenset({"SYS_ADMIN", "SYS_PTRACE", "SETUID", "SETGID"})
MOST_BYTES = 1 << 16
_NOBODY = 65534
_REAP_SECONDS = 0.5
#: /proc/<pid>/net and /proc/<pid>/mountinfo show a process's network and mounts to everybody.
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
#: What NVML needs of the file system, beside the directories in LD_LIBRARY_PATH; mounts elsewhere are not the tenant's
#: business. Of /etc the linker's cache is needed, not what a runtime mounts into it.
_TREES = ("/dev", "/proc", "/sys", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/nvidia")
_PLACES = ("/etc",)
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
_PR_GET_NO_NEW_PRIVS = 39


def main() -> int:
    """Answer one question."""
    import socket

    channel = socket.socket(fileno=os.dup(0))
    message, descriptors = channel.recv(MOST_BYTES), inherited()
    if not message:
        return 0
    try:
        answer = _answer(channel, json.loads(message), descriptors)
    except _ProbeRefused as why:
        answer = {"refused": str(why)}
    except OSError as error:
        answer = {"failed": f"{error.filename or 'the kernel'}: {error.strerror}", "init": False}
    channel.send(json.dumps(answer, separators=(",", ":")).encode())
    return 0


class _ProbeRefused(Exception):
    """The probe stays out."""


def _answer(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    # All of it before this process becomes nobody, who may not be able to read it.
    import pynvml

    from resolver.base.errors import ResolverError
    from resolver.linux.procfs import Procfs
    from resolver.workers.bystanders import objection
    from resolver.workers.nvml import Nvml

    (pidns_fd,) = descriptors
    if os.fstat(pidns_fd).st_ino != request["pidns"]:
        raise _ProbeRefused("the namespace is another one now")
    try:
        why = objection(Procfs(), request["pidns"])
    except ResolverError as error:
        why = str(error)
    if why:
        raise _ProbeRefused(why)
    nobody = _enter_and_give_up(pidns_fd, nobody=request["nobody"])
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _be_seen(lambda: ask(Nvml(pynvml), pynvml, request["uuids"], request["since"]), write_end)
    os.close(write_end)
    try:
        text = _read(read_end, channel, time.monotonic() + request["seconds"])
    finally:
        ended_by = _end(child)
    if text is None:
        return {"failed": f"it did not answer within {request['seconds']:g} s", "init": False}
    if not text:
        return {"failed": f"it was ended from inside the container{ended_by}", "init": False}
    return {**json.loads(text), "nobody": nobody}


# -- before it shows itself --------------------------------------------------------------------------------------------


def _enter_and_give_up(pidns_fd: int, *, nobody: bool) -> bool:
    """Prepare the fork into that namespace, and drop all rights; True if now user nobody. Raises OSError."""
    import ctypes
    import resource

    from resolver.linux import seccomp
    from resolver.linux.capabilities import held, limit, sets
    from resolver.linux.procfs import Procfs

    libc = ctypes.CDLL(None, use_errno=True)
    # First, since it loads all that is loaded late: where Python lies may not be in sight any more soon.
    nobody = nobody and held() >= {"SETUID", "SETGID"}
    os.chdir("/")
    _check(libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    for mount_point in unneeded(Procfs().mounts("self"), os.environ.get("LD_LIBRARY_PATH", "")):
        libc.umount2(
            os.fsencode(mount_point), _MNT_DETACH
        )  # one that is covered by another can't be, nor be seen
    _check(libc.setns(pidns_fd, _CLONE_NEWPID), "setns")
    if nobody:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    limit(frozenset())
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CPU, 5),
    ):
        hard = resource.getrlimit(kind)[1]
        new = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (new, new))
    # Last, since a change of user makes it what fs.suid_dumpable says. A fork inherits it.
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    left = any(mask for name, mask in sets().items() if name != "CapBnd")
    if left or libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise OSError(1, "something could not be given up")
    if nobody and (os.getresuid(), os.getresgid(), os.getgroups()) != ((_NOBODY,) * 3, (_NOBODY,) * 3, []):
        raise OSError(1, "the user could not be changed")
    seccomp.forbid(seccomp.DANGEROUS)  # a kernel without filters has none
    return nobody


def unneeded(mounts: list[Mount], library_path: str) -> list[str]:
    """Mount points that NVML does not need, innermost first."""
    trees = (*_TREES, *(os.path.abspath(path) for path in library_path.split(":") if path))
    found = []
    for mount in mounts:
        point = mount.mount_point
        above = any((tree + "/").startswith(point.rstrip("/") + "/") for tree in (*trees, *_PLACES))
        below = any(point.startswith(tree + "/") for tree in trees)
        if not above and not below:
            found.append(point)
    return sorted(found, key=len, reverse=True)


def _check(result: int, what: str) -> None:
    import ctypes

    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)


def _read(read_end: int, channel: socket.socket, deadline: float) -> bytes | None:
    """Read the fork's message; empty if incomplete, None if late."""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(channel, select.POLLRDHUP)
    text = b""
    while (left := deadline - time.monotonic()) > 0:
        for fd, _event in poll.poll(left * 1000):
            if fd != read_end:
                return None  # the daemon has gone, or has no patience any more
            chunk = os.read(read_end, MOST_BYTES)
            text += chunk
            if not chunk:
                return text if text.endswith(b"}") else b""
            if len(text) > MOST_BYTES:
                return b""
    return None


def _end(child: int) -> str:
    """Kill the fork. If hung in the driver, it ends later."""
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f" (signal {os.WTERMSIG(status)})" if os.WIFSIGNALED(status) else ""
        time.sleep(0.005)
    return ""


# -- in the tenant's sight ---------------------------------------------------------------------------------------------


def _be_seen(look: Callable[[], dict[str, Any]], write_end: int) -> NoReturn:
    """Call NVML and exit, in the fork."""
    try:
        _let_go_of_everything_but(write_end)
        text = json.dumps(look(), separators=(",", ":")).encode()
        if len(text) > MOST_BYTES:
            text = b'{"failed":"NVML lists more processes than are read","init":false}'
        while text:
            text = text[os.write(write_end, text) :]
    finally:
        os._exit(0)


def _let_go_of_everything_but(write_end: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(write_end, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    if write_end != 3:
        os.dup2(3, write_end)
        os.close(3)
    poll = select.poll()
    poll.register(write_end, 0)
    if poll.poll(0):  # POLLERR: the parent ended before the kernel knew that this process is to die with it
        os._exit(0)


def ask(nvml: Nvml, pynvml: Any, uuids: list[str], since: int) -> dict[str, Any]:
    """PIDs in each device's samples newer than ``since`` (us); None without samples."""
    started = False
    try:
        pynvml.nvmlInit()
        started = True
        seen = {}
        for uuid in uuids:
            answer = nvml.samples(uuid, since)
            sampled = answer["samples"] if answer["status"] == "ok" else None
            seen[uuid] = None if sampled is None else sorted({pid for pid, _stamp, _sm in sampled})
    except pynvml.NVMLError as error:
        return {"failed": f"NVML says there: {error}", "init": not started}
    return {"seen": seen}
