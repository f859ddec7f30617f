"""The demo's requirements of a machine, checked before its start."""

import os
from typing import Final, NamedTuple

from resolver.base.errors import ResolverError
from resolver.linux import capabilities
from resolver.linux.procfs import HOST_PIDNS, Procfs
from tests.programs import completed

PRIVILEGED: Final = 'docker run --privileged --pid=host -v "$PWD:$PWD" -w "$PWD" IMAGE make demo'


class _Step(NamedTuple):
    """A step that every container of the demo takes, the fault's name, and the remedy if it is refused."""

    command: str
    what: str
    help: str


_STEPS: Final = (
    _Step(
        "unshare --pid --fork true",
        "PID namespaces can't be made",
        f"CAP_SYS_ADMIN is missing, or a seccomp profile forbids it. In a container: {PRIVILEGED}",
    ),
    _Step(
        "unshare --mount --propagation private true",
        "mount namespaces can't be made private",
        "in a plain chroot the root directory is no mount point: make it one before it is entered, "
        "with mount --bind DIR DIR",
    ),
    _Step(
        "unshare --mount --pid --fork --mount-proc true",
        "/proc can't be mounted",
        f"a container's runtime has covered parts of it. Start it so: {PRIVILEGED}",
    ),
    _Step(
        "unshare --mount mount -t tmpfs none /usr/local",
        "nothing can be mounted on /usr/local",
        f"it has to exist, and mounting has to be allowed. In a container: {PRIVILEGED}",
    ),
)


def missing() -> list[str]:
    """Return a sentence with a remedy for each missing requirement. Takes some 30 ms."""
    procfs = Procfs()
    if not os.path.isdir("/proc/self"):
        return ["/proc is not mounted: mount -t proc proc /proc"]
    found = []
    try:
        if procfs.pidns("self") != HOST_PIDNS:
            found.append(
                "this is a PID namespace of its own, and `resolver run` needs the host's: leave it, or, in a "
                f"container: {PRIVILEGED}"
            )
    except (OSError, ResolverError) as error:
        found.append(f"this PID namespace can't be read from /proc ({error}): mount -t proc proc /proc")
    if "SYS_PTRACE" not in capabilities.held():
        found.append(
            f"CAP_SYS_PTRACE is missing: nobody else's namespaces can be read. In a container: {PRIVILEGED}"
        )
    for step in _STEPS:
        if said := _refused(step.command):
            found.append(f"{step.what} ({said}): {step.help}")
            break  # the others would be refused for the same reason
    return found


def in_chroot() -> bool:
    """Compare this root directory with that of its mount namespace, which entering the namespace once more leads to."""
    done = completed("nsenter", "--mount=/proc/self/ns/mnt", "stat", "--format=%d %i", "/")
    here = os.stat("/")
    return done.returncode == 0 and done.stdout.split() != [str(here.st_dev), str(here.st_ino)]


def _refused(command: str) -> str:
    """Return why a command fails; empty if it succeeds."""
    try:
        done = completed(*command.split())
    except OSError as error:
        return f"{command.split(maxsplit=1)[0]}: {error.strerror}; util-linux and mount are needed"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
