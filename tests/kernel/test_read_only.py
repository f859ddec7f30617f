"""A containers directory that is read-only for the daemon: never ready, and every command says why."""

from __future__ import annotations

from tests.fakes.command import run
from tests.fakes.node import Node
from tests.kernel.conftest import FAST, Start
from tests.patience import until


def test_read_only_directory_is_the_reason_everywhere(node: Node, start: Start) -> None:
    container = node.container(name="main")
    container.tenant(load=10, guess="none")
    place = node.containers_dir
    mount = f'mount --bind {place} {place} && mount -o remount,ro,bind {place} && exec "$@"'
    daemon = start(node, *FAST, wrapper=("unshare", "--mount", "sh", "-c", mount, "sh"))
    until(daemon.socket.exists, "its socket")

    def said(command: str, *more: str) -> tuple[int, str]:
        done = run(command, *more, "--socket", daemon.socket)
        return done.returncode, done.stdout + done.stderr

    name = f"{container.pod_uid}/main"
    until(lambda: "not_writable" in said("explain", name)[1], "the reason")
    assert said("explain", name)[0] == 1
    until(lambda: "read-only for the daemon" in said("status")[1], "it not to be ready")
    assert said("status")[0] != 0
    done = run("doctor", "--only", "containers_dir", "--run-dir", daemon.run_dir, "--containers-dir", place)
    assert (done.returncode, "is read-only for the daemon" in done.stdout) == (1, True), done.stdout
