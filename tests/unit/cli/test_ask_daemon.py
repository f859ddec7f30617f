"""`status`, `containers`, `events` and `config`, against a fake daemon that serves the API's real shapes."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from resolver import config
from resolver.api import shapes
from resolver.api.status import state_of
from resolver.base.reasons import RegionReason, SampleReason
from resolver.base.version import VERSION
from resolver.cli.containers import COLUMNS
from resolver.cli.documents import answer
from resolver.cli.show import duration, moment
from resolver.gpu.attribution import NOTHING
from resolver.gpu.inventory import Gpu, Illness, Inventory, Sample
from resolver.hami.hostpid_policy import Origin
from resolver.state import Container, PassSeconds, RegionReport, SlotReports, Snapshot, Worker
from tests.fakes import cachefiles
from tests.fakes.command import called as resolver
from tests.fakes.command import on_terminal
from tests.fakes.pictures import picture
from tests.fakes.socket_server import SocketServer, http

CID, OTHER = "4ca7193c" * 8, "0123abcd" * 8
UID = "23c50244-5588-46da-b958-f3cfca0c0cef"
AT = 1_700_000_000.0


class Daemon(SocketServer):
    """A server that answers each path with its document, and streams events until it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.documents: dict[str, Any] = {}
        self.stream: list[dict[str, Any]] = []
        super().__init__(path, self._tell)

    @property
    def targets(self) -> list[str]:
        return [request.split()[1].decode() for request in self.requests]

    def _tell(self, channel: socket.socket) -> None:
        if b"text/event-stream" in self.requests[-1]:
            events = [
                b"id: %d\ndata: %s\n\n" % (event["number"], json.dumps(event).encode())
                for event in self.stream
            ]
            channel.sendall(b"HTTP/1.1 200 OK\r\n\r\n: hello\n\n" + b"".join(events))
            return
        document = self.documents.get(self.targets[-1].partition("?")[0])
        served = document is not None
        body = msgspec.json.encode(document if served else {"detail": "no such route"})
        channel.sendall(http(body, "200 OK" if served else "404 Not Found"))

    def show(self, snapshot: Snapshot) -> None:
        """Answer as a daemon with this snapshot."""
        names = ("containers", "processes", "slots", "regions", "usage", "status", "gpus")
        self.documents |= {f"/v1/{name}": answer(snapshot, name) for name in names}
        self.documents["/v1/unresolved"] = shapes.unresolved(snapshot)[0]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "d.sock") as daemon:
        daemon.show(picture())
        yield daemon


def pairs_of(text: str) -> dict[str, str]:
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines())


def test_moments_and_durations_for_people() -> None:
    assert [moment(at) for at in (0.9996, AT)] == ["1970-01-01T00:00:01.000Z", "2023-11-14T22:13:20.000Z"]
    times = {-1: "0.0s", 0.44: "0.4s", 12: "12s", 60: "1m 0s", 11_520: "3h 12m", 90_000: "1d 1h"}
    assert {seconds: duration(seconds) for seconds in times} == times


@pytest.mark.parametrize("command", ["status", "containers", "events", "devices", "top"])
def test_missing_daemon_exits_4_with_next_step(command: str, tmp_path: Path) -> None:
    done = resolver(command, "--socket", str(tmp_path / "none.sock"))
    assert (done.returncode, done.stdout) == (4, "")
    for words in (f"{tmp_path}/none.sock", "no such socket", "resolver run", "RESOLVER_SOCKET", "reverse"):
        assert words in done.stderr
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "gone.sock"))
    done = resolver(command, RESOLVER_SOCKET=str(tmp_path / "gone.sock"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no process listens" in done.stderr


ODD = {"events": 3, "containers": [{}], "source": []}
NONSENSE: tuple[Any, ...] = ({}, [], None, 7, ODD, {"events": [[]]})


@pytest.mark.parametrize("command", ["status", "containers", "events", "devices", "top"])
@pytest.mark.parametrize("document", NONSENSE, ids=str)
def test_daemon_of_another_version_is_named(daemon: Daemon, command: str, document: Any) -> None:
    """None stands for a daemon without the route."""
    for path in ("/v1/status", "/v1/unresolved", "/v1/containers", "/v1/events", "/v1/gpus"):
        daemon.documents[path] = document
    done = resolver(command, "--socket", str(daemon.path))
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (4, "")
    assert "of this version? Restart it after an upgrade, or name its socket" in done.stderr


# ---- status -------------------------------------------------------------------------------------------------------


def sick() -> Snapshot:
    """Return a node with many problems."""
    hot = (Illness("too_hot", "96 C", AT),)
    gpu = Gpu("GPU-1", 0, 0, "NVIDIA L4", 1, 1, 5, 96, 70.0, False, (), 0, "ok", "", hot)
    orphans = tuple(Sample(n, "GPU-1", 5, SampleReason.NO_SLOT, None) for n in range(3))
    return picture(
        passed_at=AT,
        source={
            "name": "netlink",
            "not_used": {"bpf": "this kernel has no BTF"},
            "incomplete": "7 events were lost",
            "not_ready": "the canary was not found through netlink",
        },
        inventory=Inventory(3, AT, "550.54.15", (gpu, replace(gpu, uuid="GPU-2", illnesses=()))),
        joined=NOTHING._replace(error="NVML does not answer", orphans=orphans),
        collected_at=AT - 90,
        rejected={"/x.cache": RegionReason.UNKNOWN_SIZE},
        workers=(Worker("nvml worker", 4, 3, "it hung"), Worker("slot writer", 1, 0, None)),
        counters={"repairs_missing": 2, "repairs_stale": 5, "repairs_wrong_namespace": 0, "conflicts": 1},
        dry_run=True,
    )


def test_status_of_a_healthy_daemon(daemon: Daemon) -> None:
    daemon.show(picture(started_at=AT - 11_520, collected_at=AT - 0.4, joined=NOTHING._replace(error="")))
    done = resolver("status", "--socket", str(daemon.path))
    assert (done.returncode, done.stderr) == (0, "")
    told = pairs_of(done.stdout)
    assert told["resolver"] == f"{VERSION}, up 3h 12m, PID {os.getpid()}"
    assert told["ready"] == "yes"
    assert told["source"] == "scan, 5 processes"
    assert told["hostpid is"].startswith("host (by version: driver 550.54.15")
    assert told["confirmed"] == "by watchers in 1 container, doubted in 0"
    assert told["nvml"] == "driver 550.54.15, answered 0.4s ago"
    assert (told["gpus"], told["unresolved"], told["repairs"]) == ("0", "0", "0")
    assert re.fullmatch(r"[0-9.]+ MiB, [0-9.]+% of a CPU since its start", told["cost"])
    assert "\x1b" not in done.stdout


UNKNOWN_DRIVER = {"namespace": "unknown", "why": "driver 567.10 is not known", "origin": Origin.UNKNOWN}
NO_ANSWER = {
    "nvml": "driver 550.54.15, has not answered yet",
    "gpus": "-",
    "processes": None,
    "trouble": None,
}
#: Projects by placement: a newer daemon may know more than the command.
PLACEMENTS = {"hami": "HAMi device plugin", "": "no known placement", "later": "later"}
PASSES = {0.18: "180 ms", 0.00004: "0.04 ms", 2: "2000 ms"}


def placed(placement: str) -> RegionReport:
    file = "/dir/pod_main/a.cache", "pod", "main", "v1.2", ()
    return RegionReport(*file, placement=placement, slots=SlotReports(()))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"policy": UNKNOWN_DRIVER}, {"hostpid is": "unknown: driver 567.10 is not known"}),
        ({}, NO_ANSWER),  # unknown, not 0
        *(
            ({"regions": (placed(name),)}, {"found": f"1 in /dir ({PLACEMENTS[name]})"})
            for name in PLACEMENTS
        ),
        *(
            ({"pass_seconds": PassSeconds((), (), 1, seconds), "passes": 1}, {"passes": f"1, {text} each"})
            for seconds, text in PASSES.items()
        ),
    ],
)
def test_status_shows_a_state(daemon: Daemon, changes: dict[str, Any], shown: dict[str, str]) -> None:
    daemon.show(picture(**changes))
    told = pairs_of(resolver("status", "--socket", str(daemon.path)).stdout)
    assert {name: told.get(name) for name in shown} == shown


def test_status_lists_every_problem(daemon: Daemon) -> None:
    daemon.show(sick())
    done = resolver("status", "--socket", str(daemon.path))
    assert done.returncode == 1
    told = pairs_of(done.stdout)
    for words in (
        "its passes have stopped: the last pass over the slots is",
        "not ready: the canary was not found through netlink",
        "NVML is unavailable: NVML does not answer",
        "its map is incomplete: 7 events were lost",
        "it is a dry run: so it writes nothing",
    ):
        assert re.search(rf"^trouble +{words}", done.stdout, re.MULTILINE)
    assert told["ready"] == "no"
    assert told["not bpf"] == "this kernel has no BTF"
    assert told["nvml"] == "driver 550.54.15, answered 1m 30s ago"
    assert told["gpus"] == "2, 1 unhealthy"
    assert told["regions"] == "0, 1 file skipped"
    assert told["no slot"] == "3: 3 no_slot"
    assert told["repairs"] == "7: 5 stale, 2 missing"
    assert told["contested"] == "1 conflicts"
    assert told["nvml worker"] == "4 starts, 3 failures, the last: it hung"
    done = resolver("status", "--brief", "--socket", str(daemon.path))
    assert done.returncode == 1
    assert set(pairs_of(done.stdout)) == {"resolver", "ready", "source", "not bpf", "trouble"}


def test_status_as_json_adds_the_reasons(daemon: Daemon) -> None:
    daemon.show(sick())
    done = resolver("status", "--json", "--socket", str(daemon.path))
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told.pop("unresolved") == {"slots": {}, "samples": {"no_slot": 3}}
    assert told == json.loads(msgspec.json.encode(state_of(sick(), {})))


def test_colour_needs_a_terminal_without_no_color(daemon: Daemon) -> None:
    arguments = ("status", "--socket", str(daemon.path))
    assert "\x1b[32myes\x1b[0m" in on_terminal(*arguments, NO_COLOR="")
    plain = on_terminal(*arguments, NO_COLOR="1")
    assert "\x1b" not in plain
    assert pairs_of(plain)["ready"] == "yes"
    assert "\x1b" not in on_terminal(*arguments, TERM="dumb", NO_COLOR="")


# ---- containers ---------------------------------------------------------------------------------------------------

NAMES = ("main", "team-a", "train-0", "containerd")
RUNNING = (
    Container(CID, UID, *NAMES, 4026532177, 24390, ("/a.cache",), AT - 3700),
    Container(OTHER, *(None,) * 7, (), AT - 5),
)


def test_containers_in_a_pipe_have_full_ids(daemon: Daemon) -> None:
    daemon.show(picture(containers=RUNNING))
    done = resolver("containers", "--socket", str(daemon.path))
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert head == list(COLUMNS)
    since = "2023-11-14T21:11:40.000Z"
    assert rows == [
        [CID, "team-a", "train-0", "main", UID, "4026532177", "24390", "1", since],
        [OTHER, "-", "-", "-", "-", "-", "-", "0", "2023-11-14T22:13:15.000Z"],
    ]


def test_control_characters_of_names_are_escaped(daemon: Daemon) -> None:
    evil = replace(RUNNING[0], container_name="a\x1b[2J\nb\u202e", pod="x y")
    daemon.show(picture(containers=(evil,)))
    for text in (
        resolver("containers", "--socket", str(daemon.path)).stdout,
        on_terminal("containers", "--socket", str(daemon.path), NO_COLOR="1"),
    ):
        assert r"a\x1b[2J\nb\u202e" in text
        assert len(text.splitlines()) == 2


# ---- events -------------------------------------------------------------------------------------------------------


def event(number: int, kind: str = "repair", **fields: object) -> dict[str, Any]:
    return {"number": number, "at": AT + number / 1000, "kind": kind, "fields": fields}


@pytest.fixture
def events(daemon: Daemon) -> Daemon:
    kept = [event(n, slot=n) for n in range(1, 20)]
    kept += [event(20, "policy", why="driver 570: it's new", n=None), event(21, container="u_main", after=7)]
    daemon.documents["/v1/events"] = {"at": AT, "events": kept}
    return daemon


def test_events_are_printed_one_per_line(events: Daemon) -> None:
    done = resolver("events", "--socket", str(events.path))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 21
    assert lines[0] == "2023-11-14T22:13:20.001Z  repair              slot=1"
    assert lines[19] == '2023-11-14T22:13:20.020Z  policy              why="driver 570: it\'s new" n=null'
    assert lines[20] == "2023-11-14T22:13:20.021Z  repair              container=u_main after=7"


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ("--kind policy", [20]),
        ("--kind policy --kind repair", [*range(1, 22)]),
        ("--kind source", []),
    ],
)
def test_events_are_filtered_by_kind(events: Daemon, arguments: str, numbers: list[int]) -> None:
    done = resolver("events", "--json", "--socket", str(events.path), *arguments.split())
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == numbers


def of_pods(daemon: Daemon) -> None:
    other = UID.replace("2", "3")
    daemon.show(picture(containers=RUNNING[:1]))
    about = {"container": f"{UID}_main", "pod_uid": UID, "container_name": "main"}
    old = {"pod_uid": other, "container_name": "main", "namespace": "old", "pod": "gone"}
    repair = {"ns_pid": 2, "host_pid": 24395, "slot": 0, "reason": "missing", "before": 0, "after": 24395}
    file = {"container": f"{other}_main", "path": f"/usr/local/vgpu/containers/{other}_main/a.cache"}
    kept = [
        event(1, "repair", **about, **repair),
        event(2, "container_ended", **old),
        event(3, "conflict", **file),
        event(4, "policy", why="a driver that nobody knows: " * 6),
    ]
    daemon.documents["/v1/events"] = {"at": AT, "events": kept}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [("team-a/train-0", [1]), (UID, [1]), (UID[:8], [1]), ("old/gone", [2, 3]), ("no/such", [])],
)
def test_events_of_a_pod_that_runs_or_ran(daemon: Daemon, pod: str, expected: list[int]) -> None:
    of_pods(daemon)
    done = resolver("events", "--json", "--pod", pod, "--socket", str(daemon.path))
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == expected
    error = "" if expected else "no pod here is or was called 'no/such'"
    assert (done.returncode, bool(done.stderr), error in done.stderr) == (
        0 if expected else 1,
        not expected,
        True,
    )


def test_follow_continues_after_the_kept_events(events: Daemon) -> None:
    kept = events.documents["/v1/events"]["events"]
    events.stream = [*kept, event(22, slot=5), event(23, "policy"), event(24, slot=6)]
    done = resolver("events", "-f", "--json", "--kind", "repair", "--socket", str(events.path))
    numbers = [json.loads(line)["number"] for line in done.stdout.splitlines()]
    assert numbers == [*range(1, 20), 21, 22, 24]
    assert "after=0" in events.targets[-1]
    assert "kind=repair" in events.targets[-1]
    assert done.returncode == 4
    assert "ended" in done.stderr


WORDS = {"plain": "plain", "": '""', "a b": '"a b"', '"': r'"\""', "a=b": '"a=b"', "\x1b": r'"\u001b"'}


@pytest.mark.parametrize(("value", "shown"), WORDS.items())
def test_event_field_is_one_word(daemon: Daemon, value: str, shown: str) -> None:
    daemon.documents["/v1/events"] = {"at": AT, "events": [event(1, "repair", why=value)]}
    line = resolver("events", "--socket", str(daemon.path)).stdout
    assert line == f"2023-11-14T22:13:20.001Z  repair              why={shown}\n"


# ---- config -------------------------------------------------------------------------------------------------------


def table(text: str) -> dict[str, tuple[str, str]]:
    head, *rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    assert head == ["NAME", "VALUE", "FROM"]
    return {name: (value, origin) for name, value, origin in rows}


def test_config_shows_the_origin_of_each_setting(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('interval = "500ms"\nnvml-interval = 2\nrun_dir = "/run/file"\n')
    done = resolver("config", "--config", str(file), "--run-dir", "/run/flag", RESOLVER_NVML_INTERVAL="3")
    assert done.returncode == 0, done.stderr
    assert "`resolver run` would start with" in done.stderr
    told = table(done.stdout)
    assert set(told) == set(config.Settings.__struct_fields__)
    assert told["interval"] == ("500ms", f"file {file}")
    assert told["nvml_interval"] == ("3s", "environment RESOLVER_NVML_INTERVAL")
    assert told["run_dir"] == ("/run/flag", "command line")
    assert told["dry_run"] == ("false", "default")
    assert told["broker"] == ("-", "default")


@pytest.mark.parametrize("more", [("--interval", "3s"), ("--config", "FILE")])
def test_config_with_options_shows_resulting_settings(
    daemon: Daemon, tmp_path: Path, more: tuple[str, str]
) -> None:
    file = tmp_path / "r.toml"
    file.write_text("interval = 3.0\n")
    arguments = [word.replace("FILE", str(file)) for word in more]
    done = resolver("config", "--json", "--socket", str(daemon.path), *arguments)
    told = json.loads(done.stdout)
    assert told["daemon"] is None
    assert told["settings"]["interval"]["value"] == 3.0
    assert daemon.requests == []


# ---- commands that go by the daemon's settings --------------------------------------------------------------------


def with_settings(daemon: Daemon, **flags: object) -> None:
    daemon.show(picture(settings=config.described(*config.load(flags, environ={}))))


def test_slots_reads_the_daemons_directories(daemon: Daemon, tmp_path: Path) -> None:
    cachefiles.container(tmp_path / "daemon")
    with_settings(daemon, containers_dir=[str(tmp_path / "daemon")])
    done = resolver("slots", "--json", "--socket", str(daemon.path), RESOLVER_CONTAINERS_DIR="/elsewhere")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)
    assert file["path"].startswith(str(tmp_path / "daemon"))
    assert f"{tmp_path}/daemon, containers_dir of the daemon at {daemon.path}" in done.stderr


def test_slots_without_daemon_reads_configured_directories(tmp_path: Path) -> None:
    cachefiles.container(tmp_path / "file")
    (tmp_path / "r.toml").write_text(f'containers_dir = "{tmp_path}/file"\n')
    none = {"RESOLVER_SOCKET": f"{tmp_path}/none.sock", "RESOLVER_CONFIG": f"{tmp_path}/r.toml"}
    done = resolver("slots", "--json", **none)
    (file,) = json.loads(done.stdout)
    assert file["path"].startswith(str(tmp_path / "file"))
    assert f"containers_dir by file {tmp_path}/r.toml (no daemon answers at" in done.stderr
    done = resolver("slots", **none, RESOLVER_CONTAINERS_DIR=f"{tmp_path}/a:{tmp_path}/b")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"exists: {tmp_path}/a, {tmp_path}/b. They are containers_dir by" in done.stderr
    for command in (["slots"], ["reverse", str(os.getpid())]):
        done = resolver(*command, **none, RESOLVER_INTERVAL="soon")
        assert (done.returncode, done.stdout) == (2, "")


def test_daemon_without_settings_is_ignored(daemon: Daemon, tmp_path: Path) -> None:
    cachefiles.container(tmp_path / "here")
    documents: tuple[Any, ...] = ({}, [], {"settings": 5}, {"settings": {"tea": 1}})
    for document in documents:
        daemon.documents["/v1/status"] = document
        done = resolver("slots", "--socket", str(daemon.path), RESOLVER_CONTAINERS_DIR=str(tmp_path / "here"))
        assert done.returncode == 0, done.stderr
        assert "by environment RESOLVER_CONTAINERS_DIR" in done.stderr
