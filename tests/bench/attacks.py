"""Attacks by tenants on the time of all others: each costs the daemon as much as possible, at a chosen size.

Attackers are containers with the rights that a runtime gives by default, and programs in them (`hostile/hostile.c`).
Each attack is a context: it goes on while it is entered, for ``SECONDS`` at most, and leaves nothing behind.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tests.bench.crowd import crowd
from tests.fakes.cachefiles import region
from tests.fakes.container import DEFAULT_RIGHTS, Container
from tests.fakes.node import Node
from tests.fakes.regions import DEVICES, LAYOUTS, SLOTS

SECONDS: Final = 600
#: vm.max_map_count, less the mappings of the process itself.
MAPPINGS: Final = 65_000
#: A mount namespace has room for 100,000 mounts (fs.mount-max).
_DOUBLINGS: Final = 16
#: Files of a directory that are looked at are eight; seven leave room for one of the container's own.
_FILES: Final = 7
_EVERY_MS: Final = 20
_V1_2: Final = LAYOUTS["v1.2"]
assert _V1_2.device_util is not None
_SM_UTIL: Final = _V1_2.device_util + 16
#: Mounts behind which files are open: some 120 KiB of a mount table.
MOUNTS: Final = 2_450
_HOSTILE: Final = "hostile-"
#: Seconds between the ends of two containers; their files are judged a second after their last change.
_END_EVERY: Final = 0.3
#: No process of a small container has these numbers.
_NOBODY: Final = 20_000


class Scene(NamedTuple):
    """The targets of an attack: the node, the socket that containers reach, the port of /metrics."""

    node: Node
    tenant_socket: Path
    metrics: int


Begin = Callable[[Scene, int], AbstractContextManager[None]]


class Attack(NamedTuple):
    """``begin(scene, size)`` is the attack. ``named`` has a place for the size, for people.

    ``seconds``: how long it has to go on to do its worst. ``at_socket``: on the socket for containers. ``everywhere``:
    the daemon searches the directories of all schedulers. ``good``: number of good containers on the node.
    ``bounds``: in place of the bench's usual ones, in its units.
    """

    named: str
    sizes: tuple[int, ...]
    begin: Begin
    seconds: float = 12.0
    at_socket: bool = False
    everywhere: bool = False
    good: int = 1
    bounds: Mapping[str, float] = MappingProxyType({})

    def name(self, size: int) -> str:
        return self.named.format(size)


def claims(path: Path, pids: Sequence[int], *, devices: int = 1, load: int = 0) -> Path:
    """A cache file whose slots claim to be these processes', with no ``hostpid`` and this load on each device."""
    uuids = [f"GPU-5a3c1e70-8d42-4f6b-9b1e-2f7d0c9a4e{device:02x}" for device in range(devices)]
    region(path, [(pid, 0) for pid in pids], uuids, sm_util=load).chmod(0o666)
    return path


def run(container: Container, *arguments: object) -> None:
    """Start the hostile program in a container; return once the program works."""
    program = str(container.node.built / "hostile")
    container.spawn([program, str(SECONDS), *map(str, arguments)]).read_line()


@contextlib.contextmanager
def hostile_containers(node: Node, count: int, placement: str = "hami") -> Iterator[list[Container]]:
    """Containers with no more rights than usual, and gone at the end, with their directories."""
    made: list[Container] = []
    first = len(node.containers)  # names differ between attacks that run at once
    try:
        for number in range(first, first + count):
            name = f"{_HOSTILE}{number}"
            made.append(node.container(name=name, sm_limit=0, rights=DEFAULT_RIGHTS, placement=placement))
            if placement == "kai":  # every container can reach the directory
                made[-1].directory.mkdir()
                made[-1].directory.chmod(0o777)
        yield made
    finally:
        for container in made:
            container.stop()
            node.containers.remove(container)
            shutil.rmtree(container.directory, ignore_errors=True)


def _with_containers(
    act: Callable[[Scene, Container, int], object], placement: str = "hami", *, many: bool = False
) -> Begin:
    """Return an attack that acts in one container, or in as many as the size says."""

    @contextlib.contextmanager
    def begin(scene: Scene, size: int) -> Iterator[None]:
        with hostile_containers(scene.node, size if many else 1, placement) as containers:
            for container in containers:
                act(scene, container, size)
            yield

    return begin


def flip(container: Container, what: str, names: Sequence[str]) -> None:
    """Let the container write a word of every slot of its files anew, again and again."""
    paths = [Path(container.inside).parent / name for name in names]
    words = (4, 0) if what == "hostpid" else (_SM_UTIL, _V1_2.device_util_size)
    every_ms = 0 if what == "zero" else _EVERY_MS
    run(container, "flip", what, _V1_2.procs, _V1_2.slot_size, *words, every_ms, *paths)


@contextlib.contextmanager
def _lowest_weight() -> Iterator[None]:
    """Give new processes the lowest CPU weight, as a node's control groups give it to pods without requests."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _hold(_scene: Scene, container: Container, _size: int) -> None:
    """Set the values of a busy process to 0 as fast as possible, so that they are held."""
    container.tenant(load=5)
    flip(container, "zero", [container.cache_name])


def _claim_and_flip(container: Container, pids: Sequence[int] = ()) -> None:
    """Claim these slots, or those of the container's processes, and change all of them again and again."""
    claims(container.cache, pids or [process.ns_pid for process in container.processes])
    flip(container, "hostpid", [container.cache_name])


def _costly(program: str, amount: int) -> Begin:
    """One container with processes that are expensive to read, and whose slots change all the time."""

    def act(_scene: Scene, container: Container, size: int) -> None:
        for _ in range(size):
            run(container, program, amount)
        _claim_and_flip(container)

    return _with_containers(act)


@contextlib.contextmanager
def _namespaces(scene: Scene, size: int) -> Iterator[None]:
    with crowd(size, 1), hostile_containers(scene.node, 1) as (container,):
        _claim_and_flip(container, range(1, SLOTS + 1))
        yield


def _files(what: str, *, devices: int, load: int) -> Begin:
    @contextlib.contextmanager
    def begin(scene: Scene, size: int) -> Iterator[None]:
        with hostile_containers(scene.node, -(-size // _FILES)) as containers:
            for number, container in enumerate(containers):
                names = [f"{file}.cache" for file in range(min(_FILES, size - number * _FILES))]
                for file, name in enumerate(names):
                    first = _NOBODY + file * SLOTS
                    claims(
                        container.directory / name, range(first, first + SLOTS), devices=devices, load=load
                    )
                flip(container, what, names)
            yield

    return begin


def _flipping(program: str, placement: str = "hami", *more: int, inside: bool = True) -> Begin:
    """One container with a process, of its cache file if `inside`, that is expensive to read, and flipped slots."""

    def act(_scene: Scene, container: Container, size: int) -> None:
        claims(container.cache, [1])
        run(container, program, *([container.inside] if inside else []), *more, size)
        _claim_and_flip(container)

    return _with_containers(act, placement)


def _runs(words: Callable[[Scene, int], tuple[object, ...]], *, in_each: bool = False) -> Begin:
    """A program with these words, in one container, or in as many as the size says."""
    return _with_containers(lambda scene, container, size: run(container, *words(scene, size)), many=in_each)


def _in_directory(program: str, placement: str) -> Begin:
    def act(_scene: Scene, container: Container, size: int) -> None:
        claims(container.cache, [1])
        above = Path(container.inside).parent
        run(container, program, above.parent if placement == "kai" else above, size)

    return _with_containers(act, placement)


_OPENS: Final = _flipping("opens", "kai", MOUNTS)


@contextlib.contextmanager
def _many_opens(scene: Scene, size: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(_OPENS(scene, 3_500))
        yield


def _fork_with_groups(_scene: Scene, container: Container, size: int) -> None:
    run(container, "groups", size)
    _claim_and_flip(container, range(1, SLOTS + 1))


@contextlib.contextmanager
def _locks(scene: Scene, size: int) -> Iterator[None]:
    """While they exist containers end, one after the other, and leases are taken for their files.

    The list's readers take all CPUs: with the weight of others they would delay the daemon without any lock.
    """
    with contextlib.ExitStack() as stack:
        with _lowest_weight():
            container, *ended = stack.enter_context(hostile_containers(scene.node, 33))
        for other in ended:
            claims(other.cache, range(1, 33))
        claims(container.cache, [1])
        run(container, "locks", container.inside, size)
        over = threading.Event()

        def end() -> None:
            for other in ended:
                other.stop()
                if over.wait(_END_EVERY):
                    break

        ending = threading.Thread(target=end)
        ending.start()
        stack.callback(ending.join)
        stack.callback(over.set)
        yield


def _cut(_scene: Scene, container: Container, _size: int) -> None:
    """Cut files under the writer, and make them whole again."""
    for name in ("0.cache", "1.cache"):
        claims(container.directory / name, range(1, 33))
    above = Path(container.inside).parent
    run(container, "cuts", above / "0.cache", above / "1.cache")


def _make_events(_scene: Scene, container: Container, _size: int) -> None:
    claims(container.cache, [1])
    run(container, "events", container.inside, Path(container.inside).parent / "new.cache")


@contextlib.contextmanager
def _tree(scene: Scene, size: int) -> Iterator[None]:
    """Every PID namespace has a PID 1, and each file in KAI's tree could belong to any of them.

    One of them changes all its slots, and lets its file look as if processes attached to it without end.
    """
    with hostile_containers(scene.node, size, "kai") as (worst, *others):
        for container in others:
            claims(container.cache, [1])
        _make_events(scene, worst, size)
        _claim_and_flip(worst, range(1, SLOTS + 1))
        yield


@contextlib.contextmanager
def _given_up(scene: Scene, size: int) -> Iterator[None]:
    """Root's own clients: each asks for 10,000 processes at once, hangs up after half a second, and asks again."""
    body = json.dumps({"pairs": [[f"{number:064x}", 1] for number in range(10_000)]}).encode()
    head = (
        "POST /v1/lookup HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
                channel.settimeout(0.5)
                channel.connect(str(scene.tenant_socket.parent.parent / "resolver.sock"))
                channel.sendall(head.encode() + body)
                stop.wait(0.5)

    threads = [threading.Thread(target=ask) for _ in range(size)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def _named(scene: Scene, size: int) -> Iterator[None]:
    """Control groups below a tenant's own, named as those of the good containers; it needs a writable cgroupfs."""
    victims = [each for each in scene.node.containers if not each.name.startswith(_HOSTILE)]
    made: list[Path] = []
    with hostile_containers(scene.node, size) as containers:
        try:
            for container in containers:
                for victim in victims:
                    below = container.cgroup / victim.container_id
                    below.mkdir()
                    made.append(below)
                    tenant = container.tenant(load=99, guess="none")
                    (below / "cgroup.procs").write_text(str(tenant.host_pid))
            yield
        finally:
            for container in containers:
                container.stop()
            for below in made:
                with contextlib.suppress(FileNotFoundError):  # it went with its container's
                    below.rmdir()


@contextlib.contextmanager
def _all(scene: Scene, _size: int) -> Iterator[None]:
    """Every other attack at its first size, with the lowest CPU weight.

    With equal weights a hundred busy processes take all CPUs, which a node's control groups prevent.
    """
    with contextlib.ExitStack() as stack:
        with _lowest_weight():
            # Most parts first: a million names take minutes to make.
            for attack in sorted(ATTACKS.values(), key=lambda each: -each.sizes[0]):
                if attack.begin is not _all:
                    stack.enter_context(attack.begin(scene, attack.sizes[0]))
        yield


#: Every attack, each with the size that was seen to do harm once, and twice that.
ATTACKS: Final = {
    "nothing": Attack("no attack", (0,), lambda _scene, _size: contextlib.nullcontext()),
    "mappings": Attack(
        "{} processes with 65,000 mappings each", (4, 8, 16, 32), _costly("mappings", MAPPINGS)
    ),
    "mounts": Attack("{} processes with 65,000 mounts each", (2, 4), _costly("mounts", _DOUBLINGS)),
    "namespaces": Attack(
        "{} PID namespaces, one file of 1,024 claims with flipped hostpids",
        (278, 556, 3000, 6000),
        _namespaces,
    ),
    "flips": Attack("{} files of 1,024 flipped slots", (7, 14), _files("hostpid", devices=1, load=0)),
    "held": Attack(
        "{} tenants that flip held values without a pause", (4, 8), _with_containers(_hold, many=True)
    ),
    "dead": Attack(
        "{} files of 1,024 dead slots on 16 devices", (7, 14), _files("util", devices=DEVICES, load=50)
    ),
    "events": Attack(
        "{} tenants that write, make and remove files without end",
        (2, 4),
        _with_containers(_make_events, many=True),
    ),
    "tree": Attack(
        "{} tenants in one tree, all PID 1, one of which flips and writes", (40, 80), _tree, everywhere=True
    ),
    "extents": Attack(
        "{} extents freed beyond a file's end, again and again",
        (5_000, 30_000, 60_000, 150_000),
        _flipping("extents"),
    ),
    "protects": Attack(
        "{} mappings whose rights change all the time", (200, 400, 1_000, 2_000), _flipping("protects")
    ),
    "copies": Attack(
        "a mount namespace of {} mounts copied by eight processes",
        (3_000, 6_000),
        _flipping("copies", inside=False),
    ),
    "swollen": Attack(
        "a directory that once had {} names", (800_000, 1_600_000), _in_directory("names", "hami")
    ),
    "tree-swollen": Attack(
        "a tree that once had {} names", (800_000, 1_600_000), _in_directory("names", "kai"), everywhere=True
    ),
    "removes": Attack(
        "a directory that had {} names, removed in a loop",
        (800_000, 1_600_000),
        _in_directory("removes", "hami"),
    ),
    "opens": Attack("{} descriptors behind 2,450 mounts", (4_090, 8_180), _OPENS, everywhere=True),
    "many-opens": Attack(
        "{} tenants with 3,500 descriptors behind 2,450 mounts each", (12, 24), _many_opens, everywhere=True
    ),
    "groups": Attack(
        "{} forks a second with 65,536 supplementary groups", (200, 400), _with_containers(_fork_with_groups)
    ),
    "locks": Attack("{} file locks, and readers of their list", (300_000, 600_000), _locks),
    "holes": Attack(
        "{} processes with 65,000 mappings of one page, where holes are punched", (8, 16), _flipping("holes")
    ),
    "cuts": Attack(
        "{} tenants that cut two files each under the writer", (16, 32), _with_containers(_cut, many=True)
    ),
    "flight": Attack(
        "{} of root's descriptors queued in sockets, or as many as its limit allows",
        (20_240, 2_000_000),
        _runs(lambda _, size: ("flight", size)),
    ),
    "bodies": Attack(
        "{} tenants with 16 stalled bodies of 2 MB each",
        (1, 8, 16),
        _runs(lambda at, _: ("bodies", at.tenant_socket, 16, 2 << 20), in_each=True),
        at_socket=True,
    ),
    "given-up": Attack("{} of root's clients that abandon batches of 10,000", (1, 2), _given_up),
    "named": Attack("{} tenants whose control groups have others' names", (1, 2), _named),
    "scrapes": Attack(
        "{} scrapes a second, each disconnected early",
        (350, 700),
        _runs(lambda at, size: ("scrapes", at.metrics, size)),
        seconds=25.0,
    ),
    "knocks": Attack(
        "{} tenants that connect and close",
        (2, 4),
        _runs(lambda at, _: ("knocks", at.tenant_socket), in_each=True),
        at_socket=True,
    ),
    "passes": Attack(
        "passed sockets that linger for {} s",
        (8, 30),
        _runs(lambda at, size: ("passes", at.tenant_socket, size)),
        at_socket=True,
    ),
    "holds": Attack(
        "{} nested PID namespaces with 16 connections each",
        (9, 18),
        _runs(lambda at, size: ("holds", at.tenant_socket, size, 16)),
        at_socket=True,
    ),
    "all": Attack(
        "all of these at once",
        (1,),
        _all,
        seconds=60.0,
        at_socket=True,
        everywhere=True,
        good=10,
        bounds={"repair": 1000.0, "api": 200.0, "scrape": 2000.0, "memory": 8.0},
    ),
}
