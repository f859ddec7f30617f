"""One build of the containers' program, and a factory that leaves no container and no cgroup behind."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.runtime.runc import CGROUP_TOP, RuncContainer, build_tester, cgroup_mounts, remove_cgroups


class Start(Protocol):
    """Starts a container that ends with the test."""

    def __call__(
        self,
        container_id: str,
        cgroup_path: str,
        *,
        pidns: str | None = None,
        binds: tuple[tuple[Path, str], ...] = (),
    ) -> RuncContainer: ...


@pytest.fixture(scope="session")
def tester(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The containers' program."""
    return build_tester(tmp_path_factory.mktemp("tester"))


@pytest.fixture
def start(tester: Path) -> Iterator[Start]:
    """Starts containers."""
    # A short path: the kernel takes 107 bytes for that of a socket.
    work = Path(tempfile.mkdtemp(prefix="runc-"))
    try:
        with contextlib.ExitStack() as containers:

            def start_one(
                container_id: str,
                cgroup_path: str,
                *,
                pidns: str | None = None,
                binds: tuple[tuple[Path, str], ...] = (),
            ) -> RuncContainer:
                return containers.enter_context(
                    RuncContainer(tester, work, container_id, cgroup_path, pidns=pidns, binds=binds)
                )

            yield start_one
    finally:
        shutil.rmtree(work)
        for mount in cgroup_mounts():
            remove_cgroups(mount / CGROUP_TOP)
