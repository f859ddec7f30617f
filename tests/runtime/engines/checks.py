"""The checks of every engine: look-ups by every id, reverse look-ups, the list of containers, repairs."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tests.fakes.command import run
from tests.fakes.daemon import Daemon
from tests.kernel.conftest import Start
from tests.patience import until
from tests.runtime.engines.engine import Tenants

#: How a container is identified: id in its cgroup, name there, or no cgroup.
Known = Literal["id", "name", "no cgroup"]
#: The source that users get. A scan meets the host's PID 1, too, and where that can't be read (as on some virtual
#: machines) nothing proves that a container's own number 1 is the only one with its file.
FAST = ("--source", "auto", "--interval", "50ms", "--nvml-interval", "100ms", "--hostpid-namespace", "host")
Row = dict[str, Any]


def answer(*words: object) -> Any:
    """Return a command's answer, parsed; it must succeed."""
    done = run(*words, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def alone(tenants: Tenants, start: Start, *, known: Known = "id") -> Row:
    """Run all checks for a container with two tenants, or one if the engine enters no container; end it."""
    tenants.main()
    if tenants.engine.enters:
        tenants.another()
    seen = whole(tenants, start, known=known)
    tenants.stop()
    return seen


def whole(tenants: Tenants, start: Start, *options: str, known: Known = "id") -> Row:
    seen = looked_up(tenants, known=known)
    daemon = repaired(tenants, start, *options)
    return {**seen, **asked(tenants, daemon, known=known)}


def looked_up(tenants: Tenants, *, known: Known = "id") -> Row:
    ids = tenants.engine.ids(tenants.name)
    if known == "no cgroup":
        refused(tenants, ids.values())
    else:
        names(tenants, ids)
    for chain in tenants.found:
        found = answer("reverse", chain.host_pid)
        levels = tuple((level["pidns"], level["ns_pid"]) for level in found["levels"])
        assert (found["host_pid"], levels) == (chain.host_pid, chain.levels), found
        if known == "id":
            assert found["container_id"] in ids.values(), found
        else:
            assert found["container_id"] is None
            assert "no container in its cgroup path" in found["no_container"]
    unknown = tenants.engine.names(tenants.name)
    refused(tenants, unknown)
    return {
        "cgroup": cgroup_of(tenants, tenants.found[0].host_pid) if known != "no cgroup" else "none",
        "ids": [*ids] if known != "no cgroup" else [],
        "not_by": ["--name"] * bool(unknown),
        "reverse": "right" if known == "id" else "PIDs; no container",
    }


def refused(tenants: Tenants, texts: Iterable[str]) -> None:
    for text in texts:
        done = run("lookup", text, tenants.found[0].ns_pid)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert "is it running" in done.stderr, done


def names(tenants: Tenants, ids: Mapping[str, str], *options: object) -> None:
    container_id = next(iter(ids.values()))
    for chain in tenants.found:
        for each in dict.fromkeys(ids.values()):
            found = answer("lookup", each, chain.ns_pid, *options)
            assert (found["host_pid"], found["pidns"]) == (chain.host_pid, chain.pidns), found
            assert found["container_id"] == container_id, found


def repaired(tenants: Tenants, start: Start, *options: str) -> Daemon:
    daemon = start(tenants.node, *FAST, *options)
    for chain in tenants.found:
        until(lambda chain=chain: tenants.slot(chain).hostpid == chain.host_pid, "a repair", 30)  # type: ignore[misc]
    return daemon


def asked(tenants: Tenants, daemon: Daemon, *, known: Known = "id") -> Row:
    """The same look-ups by the daemon, and the containers that it lists."""
    socket = ("--socket", daemon.socket)
    daemon.wait_for("source", timeout_s=20)
    ids = tenants.engine.ids(tenants.name)
    if known != "no cgroup":
        names(tenants, ids, *socket)
    listed = {each["container_id"]: each for each in answer("containers", *socket)["containers"]}
    container_id = next(iter(ids.values()))
    assert (container_id in listed) == (known == "id")
    if known == "id":
        first, listed_container = tenants.found[0], listed[container_id]
        shared = first.ns_pid != 1  # no process of the container is the first of its namespace
        assert (listed_container["pidns"], listed_container["init_host_pid"]) == (
            (None, None) if shared else (first.pidns, first.host_pid)
        ), listed_container
    return {"containers": "listed" if known == "id" else "not listed", "repair": "right"}


def cgroup_of(tenants: Tenants, host_pid: int) -> str:
    """Return the cgroup's path that the engine chose, without the test's part of it."""
    with open(f"/proc/{host_pid}/cgroup") as file:
        paths = [line.rstrip("\n").split(":", 2)[2] for line in file]
    deepest = "/" + max(paths, key=lambda path: path.count("/")).split("/", 2)[-1].removeprefix("engines/")
    for uid in (tenants.pod_uid, tenants.pod_uid.replace("-", "_")):
        deepest = deepest.replace(uid, "<uid>")
    return re.sub("[0-9a-f]{64}", "<id>", deepest).replace(tenants.name, "<name>")
