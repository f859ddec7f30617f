"""systemd-nspawn: containers by their unit's name, which have no id.

No systemd runs here, so the test makes the cgroup that it gives a unit ``systemd-nspawn@NAME.service``.
"""

import uuid
from collections.abc import Mapping, Sequence

from tests.runtime.engines.engine import Asked, Engine

_AS_UNIT = """
echo $0 >/etc/machine-id
for top in /sys/fs/cgroup /sys/fs/cgroup/*; do
    if [ -e $top/cgroup.procs ]; then
        unit=$top/system.slice/systemd-nspawn@$1.service
        mkdir -p $unit
        echo $$ >$unit/cgroup.procs 2>/dev/null  # not possible in an unset cpuset
    fi
done
shift
exec "$@"
"""


class Nspawn(Engine):
    """`systemd-nspawn`, which ends with the machine. It takes machined, which is not here, to enter one."""

    enters = False

    def start(self, asked: Asked, *options: str) -> None:
        words = [
            *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--machine={asked.name}"),
            f"--directory={self.machine.work / 'rootfs'}",
            *(f"--bind{'-ro' * mount.read_only}={mount.source}:{mount.target}" for mount in asked.mounts),
            *(f"--setenv={key}={value}" for key, value in asked.env.items()),
            *options,
            *("--", *asked.command),
        ]
        self.machine.daemon("sh", "-c", _AS_UNIT, uuid.uuid4().hex, asked.name, *words)

    def enter(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        raise NotImplementedError

    def ids(self, name: str) -> dict[str, str]:
        return {"--machine": name}

    def stop(self, name: str) -> None:
        """Leave the container to the end of the machine."""
