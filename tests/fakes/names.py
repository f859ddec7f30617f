"""Names that the product gives to events, counters and metrics: a test that waits for another name asserts nothing."""

import re
from enum import StrEnum
from typing import Final

from resolver.base import reasons
from resolver.base.counters import CounterByReason, CounterName, Shortage
from tests.fakes.warm import ROOT

#: From the reference, which `test_every_log_event_is_in_the_reference` compares with the code.
EVENTS: Final = frozenset(
    re.findall(
        r"^\| `(\w+)` \|",
        (ROOT / "docs/monitoring.md").read_text().partition("\n| kind | meaning |")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
)

#: From the reference, which `make tables` writes.
METRICS: Final = frozenset(
    re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
)

REASONS: Final = frozenset(
    reason.value
    for kind in vars(reasons).values()
    if isinstance(kind, type) and issubclass(kind, StrEnum)
    for reason in kind
)

COUNTERS: Final = frozenset(CounterName) | {
    f"{counter}_{reason}" for counter in CounterByReason for reason in (*REASONS, *Shortage)
}
