"""Numbers as Grafana writes them, and where an axis is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

#: Of each unit: sizes with their names, and the name of what is smaller than all of them.
_SCALES: Final = {
    "bytes": (((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")), " B"),
    "s": (((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")), " s"),
    "short": (((1e6, "Mil"), (1e3, "K")), ""),
}
_AFTER: Final = {"celsius": " °C", "watt": " W"}


def number(value: float, unit: str) -> str:
    """With its unit, in three digits or so."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{_digits(value * 100)}%"
    if unit in _SCALES:
        return _scaled(value, *_SCALES[unit])
    return _digits(value) + _AFTER.get(unit, "")


def _scaled(value: float, scale: Sequence[tuple[float, str]], smallest: str) -> str:
    for size, name in scale:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return _digits(value) + smallest


def _digits(value: float) -> str:
    places = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(most: float, unit: str) -> list[float]:
    """Four or five marks from 0 to just above ``most``, at round numbers of the unit."""
    if not math.isfinite(most) or most <= 0:
        most = 1.0
    binary = unit == "bytes"
    size = 1024.0 ** math.floor(math.log(most, 1024)) if binary and most >= 1 else 1.0
    wanted = most / size / 4
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= wanted * 0.999)
    count = max(1, math.ceil(most / size / step - 1e-9))
    return [round(index * step * size, 12) for index in range(count + 1)]
