"""Discovery in a directory that every container can write: only kubelet's names for containers count."""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolver.base.budget import Budgets
from resolver.base.errors import RegionRejected, TooSlow, WorkerFailed
from resolver.base.reasons import RegionReason
from resolver.containers.log_names import ContainerNames
from resolver.hami import directory_finder
from resolver.hami.candidates import SOON
from resolver.hami.directory_finder import MAX_STRAYS, DirectoryFinder
from resolver.hami.directory_reads import hold_file, look_into
from resolver.hami.discovery import FIRST_PAUSE, PodFile, refusal
from resolver.hami.placements import AUTO
from resolver.hami.watches import Watches
from resolver.linux.procfs import Procfs
from resolver.linux.safe_open import let_go
from resolver.workers.lanes import TenantReader
from tests.fakes import cachefiles
from tests.fakes.clock import Clock
from tests.fakes.direct import Refusing, Waiting, at_once, ended_lane
from tests.patience import PATIENCE_S

POD = cachefiles.POD_UID
CLAIM = "7d0c6e3e-2f6d-4e0b-9b57-0d3c8f4b5a12"
A = "a" * 64


class Kubelet:
    """Kubelet's two directories of logs."""

    def __init__(self, root: Path) -> None:
        self.links, self.pods = root / "log/containers", root / "log/pods"
        self.links.mkdir(parents=True)
        self.names = ContainerNames(str(self.links), str(self.pods))

    def has(self, pod_uid: str, container: str, container_id: str = A) -> None:
        pod = f"pod-{pod_uid[:8]}"
        (self.pods / f"ns_{pod}_{pod_uid}").mkdir(parents=True, exist_ok=True)
        (self.links / f"{pod}_ns_{container}-{container_id}.log").symlink_to("/nowhere")


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "vgpu/containers"
    path.mkdir(parents=True)
    path.chmod(0o1777)
    return path


@pytest.fixture
def find(tree: Path, kubelet: Kubelet) -> Iterator[DirectoryFinder]:
    finder = cachefiles.AtOnce([str(tree)], Procfs(), names=kubelet.names)
    yield finder
    finder.close()


def usage(tree: Path, entry: str) -> Path:
    return cachefiles.write(tree / entry / "usage.cache", cachefiles.recorded("v1.2"))


def test_only_entries_of_kubelets_containers_are_opened(
    find: DirectoryFinder, tree: Path, kubelet: Kubelet
) -> None:
    kubelet.has(POD, "main")
    mine, forged = usage(tree, f"{POD}_main"), usage(tree, f"{POD}_other")
    (found,) = find.refresh(full=True).added
    assert found.path == str(mine)
    assert (found.ownership.placement, found.ownership.pod_uid, found.ownership.container_name) == (
        "kai",
        POD,
        "main",
    )
    assert found.ownership.account == str(mine.parent)  # charged to the real directory, not to the forged one
    assert find.rejected == {str(forged.parent): RegionReason.NOT_ON_NODE}
    place = found.location.proof
    assert isinstance(place, PodFile)
    assert (place.pod_uid, place.container_name) == (POD, "main")
    assert place.file.path.endswith(f"/{POD}_main/usage.cache")
    kubelet.has(POD, "other", "b" * 64)
    assert [each.path for each in find.refresh(full=True).added] == [str(forged)]
    assert find.rejected == {}


def test_a_flood_of_entries_hides_none(
    find: DirectoryFinder, tree: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_finder, "MAX_CONTAINERS", 100)
    kubelet.has(POD, "main")
    for number in range(500):
        (tree / f"{POD}_x{number:03}").mkdir()
    mine = usage(tree, f"{POD}_main")
    for number in range(200):  # files in the container's directory cost no budget either
        (mine.parent / f"{number}.cache").touch()
    assert [each.path for each in find.refresh(full=True).added] == [str(mine)]
    strays = [path for path, why in find.rejected.items() if why is RegionReason.NOT_ON_NODE]
    assert len(strays) == MAX_STRAYS


def test_a_file_that_was_moved_while_it_was_opened(
    find: DirectoryFinder, tree: Path, kubelet: Kubelet
) -> None:
    kubelet.has(POD, "main")
    kubelet.has(POD, "side", "b" * 64)
    mine, other = usage(tree, f"{POD}_main"), usage(tree, f"{POD}_side")
    regions = {found.path: found.region for found in find.refresh(full=True).added}
    (candidate,) = find._roots[0].directories[mine.parent.name].candidates.values()
    mine.parent.rename(tree / "between")
    other.parent.rename(mine.parent)
    with pytest.raises(RegionRejected) as refused:
        at_once(find._candidates.locate(candidate, regions[str(mine)]))
    assert refused.value.reason is RegionReason.GONE


def test_directory_given_twice_is_searched_once(tmp_path: Path) -> None:
    file = cachefiles.container(tmp_path, "main")
    finder = cachefiles.AtOnce([str(tmp_path), f"{tmp_path}/"], Procfs())
    assert [found.path for found in finder.refresh(full=True).added] == [str(file)]
    file.unlink()
    assert [region.path for region in finder.refresh(full=True).removed] == [str(file)]
    finder.close()


def test_once_shared_it_stays_so(find: DirectoryFinder, tree: Path, kubelet: Kubelet) -> None:
    """A root tenant can change the mode of a directory that it mounts."""
    kubelet.has(POD, "main")
    usage(tree, f"{POD}_main")
    find.refresh(full=True)
    tree.chmod(0o755)
    forged = cachefiles.container(tree, "forged")
    assert find.refresh(full=True).added == []
    assert find.rejected[str(forged.parent)] is RegionReason.NOT_ON_NODE


def test_kai_name_comes_from_pod_of_closed_directory(
    find: DirectoryFinder, tree: Path, kubelet: Kubelet
) -> None:
    tree.chmod(0o755)
    mine, forged = usage(tree, f"{POD}_main"), usage(tree, f"{POD}_forged")
    kubelet.has(POD, "main")
    (found,) = find.refresh(full=True).added
    assert found.path == str(mine)
    assert isinstance(found.location.proof, PodFile)
    assert find.rejected == {str(forged): RegionReason.NOT_ON_NODE}


# ---- waits --------------------------------------------------------------------------------------------------------


class Lane(TenantReader):
    """A lane that records calls outside the lane which open or list a name below ``tree``."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(Procfs())
        self.elsewhere = list[str]()
        self._tree, self._asked = str(tree), False
        for name in ("stat", "open", "scandir", "listdir", "access"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            above = options.get("dir_fd") if options.get("dir_fd") is not None else path
            where = os.readlink(f"/proc/self/fd/{above}") if isinstance(above, int) else str(above)
            if not self._asked and (where.startswith(f"{self._tree}/") or name == "scandir"):
                self.elsewhere.append(f"{name} {path} in {where}")
            return call(path, *arguments, **options)

        return noted

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self._asked = True
        try:
            return await super().ask(payer, about, function, *arguments)
        finally:
            self._asked = False


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_only_lanes_list_tenant_directories(
    tree: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """The kernel delays a listing by the directory's former size, and while a large entry is removed."""
    tree.chmod(mode)
    kubelet.has(POD, "main")
    file = usage(tree, f"{POD}_main")
    lane = Lane(tree, monkeypatch)
    finder = cachefiles.AtOnce([str(tree)], Procfs(), names=kubelet.names, reader=lane)
    (found,) = finder.refresh(full=True).added
    assert found.path == str(file)
    file.unlink()
    assert finder.refresh(full=True).removed == [found.region]
    finder.close()
    assert lane.elsewhere == []


class Halting(TenantReader):
    """A lane that holds back each listing of the directory ``name`` until the test releases it."""

    def __init__(self, name: str = "") -> None:
        super().__init__(Procfs())
        self.go, self._name = asyncio.Event(), name

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        answer = await super().ask(payer, about, function, *arguments)
        if function is look_into and about.endswith(self._name):
            await self.go.wait()
        return answer


async def test_a_directory_that_makes_its_lane_wait_holds_up_no_other(tmp_path: Path) -> None:
    good, slow = cachefiles.container(tmp_path, "good"), cachefiles.container(tmp_path, "slow")
    finder = DirectoryFinder([str(tmp_path)], Procfs(), reader=Halting("_slow"))
    added = set[str]()
    for _ in range(5):
        added |= {region.path for region in finder.refresh(full=False).added}
        await asyncio.sleep(0)
    assert (added, finder.rejected) == ({str(good)}, {})
    slow.unlink()
    slow.parent.rmdir()
    finder.refresh(full=True)
    finder.close()


class Ended(TenantReader):
    """A lane that ended after it answered with the file ``offered``."""

    offered = ""

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        answer = await super().ask(payer, about, function, *arguments)
        if function is hold_file and self.offered:
            let_go(answer[0].fd)
            return self.offered, *answer[1:]
        return answer


def test_lane_that_ended_since_its_answer_blames_no_file(tmp_path: Path) -> None:
    lane, clock, file = Ended(Procfs()), Clock(), cachefiles.container(tmp_path)
    finder = cachefiles.AtOnce([str(tmp_path)], Procfs(), clock, reader=lane)
    with ended_lane() as lane.offered:
        assert finder.refresh(full=True) == ([], [], [])
    lane.offered, clock.now = "", clock.now + SOON
    assert [found.path for found in finder.refresh(full=False).added] == [str(file)]
    finder.close()


class Failing(Waiting):
    """A lane with a defect in some directories."""

    def __init__(self, directories: set[str]) -> None:
        super().__init__(Procfs())
        self.directories = directories

    async def ask(self, payer: str, about: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if about in self.directories:
            raise ZeroDivisionError
        return await super().ask(payer, about, function, *arguments)


async def test_defects_in_some_directories_fail_one_refresh(tmp_path: Path) -> None:
    good = [cachefiles.container(tmp_path, name) for name in ("one", "two")]
    bad = [cachefiles.container(tmp_path, f"bad{number}").parent for number in range(3)]
    lane = Failing({str(directory) for directory in bad})
    finder = DirectoryFinder([str(tmp_path)], Procfs(), reader=lane)
    added, errors = set[str](), []
    for _ in range(8):
        try:
            added |= {found.path for found in finder.refresh(full=False).added}
        except ExceptionGroup as group:
            errors.append(list(map(type, group.exceptions)))
        for _ in range(5):
            await asyncio.sleep(0)
    assert (added, errors) == ({str(path) for path in good}, [[ZeroDivisionError] * 3])
    finder.close()


async def test_each_answer_of_a_lane_wakes_the_next_refresh(tmp_path: Path) -> None:
    """Only an answer wakes it: no refresh polls for one, and none waits for a timer."""
    path, woken = cachefiles.container(tmp_path, "new"), asyncio.Event()
    finder = DirectoryFinder([str(tmp_path)], Procfs(), reader=Waiting(Procfs()), wake=woken.set)
    finder.refresh(full=True)
    refreshes = 1
    while str(path) not in finder.regions:
        assert finder.wants() == math.inf
        async with asyncio.timeout(PATIENCE_S):
            await woken.wait()
        woken.clear()
        assert finder.wants() == 0.0
        finder.refresh(full=False)
        refreshes += 1
    assert refreshes == 3  # one more for each answer: the root's entries, and the directory's opened files
    finder.close()


async def test_news_during_a_listing_is_followed_at_once(tmp_path: Path) -> None:
    (tmp_path / "uid_first").mkdir()
    watches, lane = Watches(Budgets(), Counter()), Halting()
    finder = DirectoryFinder([str(tmp_path)], Procfs(), watches=watches, reader=lane)

    async def refresh() -> None:
        finder.refresh(full=False)
        for _ in range(5):
            await asyncio.sleep(0)

    lane.go.set()
    await refresh()
    lane.go.clear()
    (tmp_path / "uid_first/other").touch()
    watches.take()
    await refresh()  # the listing has begun, so it lacks files made later
    made = cachefiles.write(tmp_path / "uid_first/x.cache", cachefiles.recorded("v1.2"))
    watches.take()
    lane.go.set()
    for _ in range(20):
        await asyncio.sleep(0)
        assert str(made) in finder.regions or finder.wants() <= time.monotonic() + 1
        await refresh()
        time.sleep(0.005)  # noqa: ASYNC251 - until the next poll
    assert str(made) in finder.regions
    finder.close()
    watches.close()


# ---- auto ---------------------------------------------------------------------------------------------------------


def searched(finder: DirectoryFinder) -> list[str]:
    return [root.path for root in finder._roots if root.fd >= 0]


def test_auto_uses_existing_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hami, volcano = tmp_path / "hami/containers", tmp_path / "volcano/containers"
    monkeypatch.setattr(directory_finder, "KNOWN_DIRS", (str(hami), str(volcano)))
    finder = cachefiles.AtOnce([AUTO], Procfs())
    finder.refresh(full=True)
    assert (finder.dirs, finder.missing_dirs, searched(finder)) == ([AUTO], {AUTO}, [])
    file = cachefiles.container(volcano)
    assert [each.path for each in finder.refresh(full=True).added] == [str(file)]
    assert (finder.missing_dirs, searched(finder)) == (set(), [str(volcano)])
    hami.parent.mkdir()
    hami.symlink_to(volcano)  # the same directory by another name is not searched twice
    assert finder.refresh(full=True).added == []
    assert searched(finder) == [str(volcano)]
    finder.close()


def test_auto_trusts_no_users_directory_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tmp_path.parts[1] == "tmp", "this test is about that directory"
    given = tmp_path / "given/containers"
    file = cachefiles.container(given)
    monkeypatch.setattr(directory_finder, "KNOWN_DIRS", (str(given),))
    os.chown(given.parent, 4711, 4711)
    finder = cachefiles.AtOnce([AUTO], Procfs())
    assert finder.refresh(full=True).added == []
    assert finder.missing_dirs == {AUTO}
    os.chown(given.parent, 0, 0)
    assert [each.path for each in finder.refresh(full=True).added] == [str(file)]
    finder.close()


def test_a_file_that_hami_is_still_making_is_not_reported(tmp_path: Path) -> None:
    clock = Clock()
    finder = cachefiles.AtOnce([str(tmp_path)], Procfs(), clock)
    path = tmp_path / f"{POD}_main/x.cache"
    cachefiles.write(path, b"")
    try:
        for seconds, reported in ((0.0, []), (1.0, []), (2.5, [RegionReason.UNKNOWN_SIZE])):
            clock.now = 1000.0 + seconds
            assert [why.reason for _, why in finder.refresh(full=True).rejected] == reported
        path.write_bytes(cachefiles.recorded("v1.2"))
        clock.now += FIRST_PAUSE
        assert [found.path for found in finder.refresh(full=True).added] == [str(path)]
    finally:
        finder.close()


def test_lane_without_resources_rejects_no_file(tmp_path: Path) -> None:
    clock, lane = Clock(), Refusing(Procfs(), hold_file=WorkerFailed("too many open files", waiting=True))
    finder = cachefiles.AtOnce([str(tmp_path)], Procfs(), clock, reader=lane)
    path = cachefiles.container(tmp_path)
    for _ in range(12):
        changes = finder.refresh(full=True)
        assert (changes.added, changes.rejected, finder.rejected) == ([], [], {})
        clock.now += FIRST_PAUSE
    lane.errors.clear()
    assert [found.path for found in finder.refresh(full=True).added] == [str(path)]
    finder.close()


@pytest.mark.parametrize("error", [WorkerFailed("the reader did not answer within 5 s"), TooSlow("a lock")])
def test_overloaded_reader_is_no_error_of_the_file(error: Exception) -> None:
    assert refusal(error).reason is RegionReason.OVERLOADED
    assert not RegionReason.OVERLOADED.grave
