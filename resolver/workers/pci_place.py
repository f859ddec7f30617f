"""A GPU's place in the machine, from sysfs; None if unknown."""

import os
import re

_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])")


def pci_address(bus_id: str) -> str | None:
    """Convert NVML's ``00000000:3B:00.0`` to ``0000:3b:00.0``; None if malformed."""
    match = _BUS_ID.fullmatch(bus_id)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def place_of(address: str | None, sysfs: str = "/sys") -> dict[str, str | int | None]:
    """Return a device's NUMA node, PCI root complex and CPU socket."""
    if address is None:
        return {"numa_node": None, "pcie_root": None, "cpu_socket": None}
    directory = f"{sysfs}/bus/pci/devices/{address}"
    return {
        "numa_node": _numa_node(directory, sysfs),
        "pcie_root": _pcie_root(directory),
        "cpu_socket": _cpu_socket(directory, sysfs),
    }


def _numa_node(directory: str, sysfs: str) -> int | None:
    """NUMA node; -1 ("unknown") with a single node is 0."""
    node = _number(_read(f"{directory}/numa_node"))
    if node == -1 and _read(f"{sysfs}/devices/system/node/online") == "0":
        return 0
    return node if node is not None and node >= 0 else None


def _pcie_root(directory: str) -> str | None:
    """``pci0000:3a``: the link leads through it, ``../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0``."""
    try:
        parts = os.readlink(directory).split("/")
    except OSError:
        return None
    return next((part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), None)


def _cpu_socket(directory: str, sysfs: str) -> int | None:
    """Return the CPUs' socket; None for several."""
    sockets = set()
    for cpu in re.findall(r"\d+", _read(f"{directory}/local_cpulist")):  # both ends of each range
        sockets.add(_number(_read(f"{sysfs}/devices/system/cpu/cpu{cpu}/topology/physical_package_id")))
    socket = sockets.pop() if len(sockets) == 1 else None
    return socket if socket is not None and socket >= 0 else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
