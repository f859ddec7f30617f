"""One pass's inputs and cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.base.budget import Slices

if TYPE_CHECKING:
    from resolver.base.budget import Budgets
    from resolver.config import Settings
    from resolver.gpu.attribution import Joined
    from resolver.hami.hostpid_policy import HostpidPolicy

#: Seconds that no container is charged for: a region was only read.
_TRIFLE_SECONDS = 5e-5
#: Work that is due so soon is done at once.
_TOGETHER_SECONDS = 0.005


class Pass:
    """One pass's inputs and cost so far. ``patient``: budgets count."""

    def __init__(
        self,
        settings: Settings,
        policy: HostpidPolicy,
        joined: Joined,
        budgets: Budgets,
        *,
        patient: bool,
        everything: bool,
    ) -> None:
        self.now = time.monotonic()
        self.settings, self.policy, self.joined = settings, policy, joined
        self.patient, self.everything = patient, everything
        self.ahead = _TOGETHER_SECONDS  # work due within so many seconds is done now
        self.slices = Slices()
        self.spent = 0.0  # seconds on the loop
        self.answered = 0.0  # when NVML's answer was first seen
        self._budgets = budgets

    def charge(self, container: str, seconds: float) -> None:
        """Charge the pass and, unless negligible, the container."""
        self.spent += seconds
        if seconds >= _TRIFLE_SECONDS:
            self._budgets.spend(container, seconds)

    def over(self, container: str) -> bool:
        """Check if this container must wait."""
        return self.patient and self._budgets.over(container)
