"""Rules for every test: none is skipped, none hangs; it names its need of root, and gets the machine if it needs it.

`make test` runs several files at a time. A test marked `alone` runs while no other test does, in any worker, because it
counts objects of the whole kernel. So does a test that failed beside others and is run once more.
"""

import asyncio
import fcntl
import gc
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
import structlog

from resolver.workers import supervisor
from tests import isolation
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
#: Keep pytest's rewritten assertions: rewriting them in every worker costs ten seconds of CPU.
sys.dont_write_bytecode = False
isolation.isolate()
ABSENT = isolation.absent()

# Collected tests live to the end: the garbage collector needn't visit them.
gc.disable()

# How long an example may take is no question: another process may have the machine. The examples are the same on each.
hypothesis.settings.register_profile("any machine", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("any machine")

# A killed child that the machine has no time to end would be left to a later one, and there is none.
supervisor.KILLED_SECONDS = PATIENCE_S

#: Tests in these directories make namespaces, cgroups and containers.
NEEDS_ROOT = ("tests/kernel/", "tests/runtime/")


#: A file runs in one piece: those that take longest begin, in this order, and the rest fills the gaps.
FIRST = (
    "unit/suite/test_style", "kernel/test_sources", "kernel/test_repairer", "kernel/test_slot_writer",
    "kernel/test_collector", "kernel/test_daemon", "kernel/test_hostile_daemon", "kernel/test_hostpid_policy",
    "kernel/test_reported_values", "kernel/test_capabilities", "kernel/test_mapping_finder", "kernel/test_lookups",
    "unit/kube/test_reporter", "kernel/test_budget", "kernel/test_prometheus",
    "kernel/test_bpf_map", "kernel/test_health", "kernel/test_access", "runtime/test_pods",
)  # fmt: skip

#: The seed of a random order, for all workers; set by `--seed`.
SEED = "TESTS_SEED"


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", help="run the tests in this random order; `random` chooses one, and names it")


def pytest_configure(config: pytest.Config) -> None:
    if seed := config.getoption("--seed"):
        os.environ.setdefault(SEED, str(random.randrange(1_000_000)) if seed == "random" else seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-k word` only files with this word in them, or in their names, are imported."""
    word = config.option.keyword.lower()
    if not word.isidentifier() or collection_path.suffix != ".py" or word in str(collection_path):
        return None
    return word not in collection_path.read_text().lower() or None


def pytest_report_header() -> str:
    return f"order: --seed={os.environ[SEED]}" if SEED in os.environ else "order: as written"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"tests/{name}.py": number for number, name in enumerate(FIRST)}
    if SEED in os.environ:
        chance = random.Random(os.environ[SEED])
        chance.shuffle(items)
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: files.index(item.path))
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(FIRST)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if made := ABSENT - isolation.absent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nthe tests made {', '.join(sorted(made))}, which is this machine's own")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.nodeid.startswith(NEEDS_ROOT) and os.geteuid() != 0:
        pytest.fail(
            "this test makes real namespaces and containers and needs root: sudo make test", pytrace=False
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, and a skipped test proves nothing: {report.longrepr}"
        vars(report).pop("wasxfail", None)  # with it, pytest shows a failure and still exits 0
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole file was skipped, and that proves nothing: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files to lock. A test that must run alone also holds the first, so that no later test passes it."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # of all workers
    return place / "door", place / "room"


@pytest.fixture(scope="session")
def program(doors: tuple[Path, Path]) -> Path:
    """Where the workers keep the compiled probes of the daemon's usual map, named as it names them."""
    return doors[0].parent / "bpf-program"


@pytest.fixture(autouse=True)
def the_machine(request: pytest.FixtureRequest, doors: tuple[Path, Path]) -> Iterator[None]:
    again = getattr(request.node, "execution_count", 1) > 1  # it failed beside other tests
    alone = again or request.node.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        door, room = (stack.enter_context(path.open("w")) for path in doors)
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory with a short path that every user can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="resolver-") as name:
        os.chmod(name, 0o755)  # noqa: S103 - that is its use
        yield Path(name)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """Reset where log lines go after each test: the test's place may be closed by then."""
    yield
    structlog.reset_defaults()
