"""The gate for the loop's system calls itself; daemons of all kernel tests go through it (`conftest.Start`)."""

from __future__ import annotations

import threading
from pathlib import Path

from resolver.linux.procfs import Procfs
from tests.fakes.loop_calls import unlisted
from tests.fakes.traced import Call, Tracer


def test_call_without_a_line_is_named(tracer: Tracer, tmp_path: Path) -> None:
    tenants = tmp_path / "containers" / "uid_main"
    tenants.mkdir(parents=True)
    (tenants / "a.cache").touch()
    tid = threading.get_native_id()
    tracer.watch(tid)
    Path("/proc/1/status").read_bytes()
    Procfs(careful=True).cgroup(1)
    (tenants / "a.cache").read_bytes()
    seen = tracer.take(tid)
    names = {call for call in unlisted(seen) if call.name == "openat"}
    assert Call("openat", "/proc/#/status") in names
    assert any(call.about.endswith("/containers/uid_main/a.cache") for call in names)
    assert Call("openat", "cgroup in proc") not in names
    assert seen[Call("openat", "cgroup in proc")].times == 1
    assert tracer.take(tid) == {}
