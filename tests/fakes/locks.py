"""What the lock files pin."""

import re

#: Packages published for one architecture only.
CONDITION = r"(?: ; platform_machine == \"x86_64\")?"


def pinned(lock: str) -> dict[str, str]:
    """Return the locked versions by package, spelled as in the index."""
    return dict(re.findall(rf"^([a-z0-9][a-z0-9.-]*)==(\S+){CONDITION} \\$", lock, re.MULTILINE))
