"""A GPU's place in the machine, read from a fake sysfs."""

from pathlib import Path

import pytest

from resolver.workers.nvml_devices import pci_address, place_of

ADDRESS = "0000:3b:00.0"
NOTHING = {"numa_node": None, "pcie_root": None, "cpu_socket": None}


def sysfs(root: Path, numa_node: str = "1\n", cpus: str = "8-15,24-31\n", sockets: str = "1111") -> str:
    device = root / "devices/pci0000:3a/0000:3a:00.0" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(numa_node)
    (device / "local_cpulist").write_text(cpus)
    (root / "bus/pci/devices").mkdir(parents=True)
    (root / "bus/pci/devices" / ADDRESS).symlink_to(f"../../../devices/pci0000:3a/0000:3a:00.0/{ADDRESS}")
    for number in range(32):
        socket = sockets[number // 8]
        topology = root / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
    (root / "devices/system/node").mkdir()
    (root / "devices/system/node/online").write_text("0-1\n")
    return str(root)


@pytest.mark.parametrize(
    ("nvml_text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:AF:1F.7", "0000:af:1f.7"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("", None),
        ("3B:00.0", None),
        ("00000000:3B:00.8", None),
        ("../../../etc", None),
    ],
)
def test_an_address_is_written_as_the_kernel_does(nvml_text: str, address: str | None) -> None:
    assert pci_address(nvml_text) == address


def test_a_gpu_has_its_node_its_root_and_its_socket(tmp_path: Path) -> None:
    place = place_of(ADDRESS, sysfs(tmp_path))
    assert place == {"numa_node": 1, "pcie_root": "pci0000:3a", "cpu_socket": 1}


def test_absent_files_are_unknown(tmp_path: Path) -> None:
    assert place_of(ADDRESS, str(tmp_path)) == NOTHING
    assert place_of(None, str(tmp_path)) == NOTHING


def test_unnamed_numa_node_is_the_only_one(tmp_path: Path) -> None:
    root = sysfs(tmp_path, numa_node="-1\n", sockets="0000")
    assert place_of(ADDRESS, root)["numa_node"] is None
    (tmp_path / "devices/system/node/online").write_text("0\n")
    assert place_of(ADDRESS, root)["numa_node"] == 0


@pytest.mark.parametrize(("cpus", "sockets"), [("0-31\n", "0123"), ("", "0000"), ("8\n", "0-00")])
def test_a_socket_is_not_guessed(tmp_path: Path, cpus: str, sockets: str) -> None:
    """The GPU is near CPUs of two sockets or of none, or its socket's number is -1 or missing."""
    assert place_of(ADDRESS, sysfs(tmp_path, cpus=cpus, sockets=sockets))["cpu_socket"] is None
