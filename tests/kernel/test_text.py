"""Names that tenants choose: no text, and no signs that a terminal or a parser obeys."""

import os

import pytest

from resolver import client
from tests.fakes.cachefiles import recorded, write
from tests.fakes.node import Node
from tests.kernel.conftest import Start, command
from tests.patience import PATIENCE_S

_LISTS = ("containers", "regions", "slots", "processes", "gpus", "unresolved", "status", "events")


@pytest.mark.parametrize("name", [b"\xff.cache", b"\x1b]0;owned\x07.cache", "\u202egnp.cache".encode()])
def test_no_name_of_a_file_stops_an_answer(node: Node, start: Start, name: bytes) -> None:
    """One file named so made /v1/regions answer 500 for everybody, and `top`, `status` and others fail."""
    good, evil = node.container(name="good"), node.container(name="evil")
    tenant = good.tenant(load=20, guess="none")
    evil.directory.mkdir(exist_ok=True)
    other = evil.directory / "other"
    write(other, recorded("v1.2"))
    os.rename(bytes(other), bytes(evil.directory) + b"/" + name)
    daemon = start(node, "--interval", "50ms")
    tenant.until_repaired()
    line = daemon.wait_for("region_rejected")
    assert line["reason"] == "bad_name"
    assert line["path"].isprintable()
    for each in _LISTS:
        assert client.get_json(f"/v1/{each}", str(daemon.socket), seconds=PATIENCE_S)
    for words in (
        ("status",),
        ("slots",),
        ("containers",),
        ("explain", good.container_id),
        ("top", "--once"),
    ):
        done = command(node, daemon.run_dir, node.pod_logs_dir, *words)
        assert "Traceback" not in done.stderr
        assert all(sign.isprintable() or sign == "\n" for sign in done.stdout + done.stderr)
