"""Decision in force on which number ``hostpid`` must be: the setting's or the driver version's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from resolver.hami.hostpid_policy import WatcherFinding, contradiction, decide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resolver.base.journal import Journal
    from resolver.config import HostpidNamespace

#: Containers that doubt the policy, none confirming it for so many seconds, cause a warning.
_DOUBTING, _DOUBTED_SECONDS = 2, 30.0


class Decision:
    """The ``policy`` in force. Tenants' watchers never change it: a tenant can write any value."""

    def __init__(self, setting: HostpidNamespace, journal: Journal) -> None:
        self.policy = decide(setting, None)
        self._journal = journal
        self._logged = self._warned = False
        self._doubted_since: float | None = None

    def decide(self, setting: HostpidNamespace, driver_version: str | None) -> None:
        """Decide, and log what is new."""
        policy = decide(setting, driver_version)
        if self._logged and self.policy == policy:
            return
        self.policy, self._logged, self._warned, self._doubted_since = policy, True, False, None
        namespace = policy.namespace or "unknown"
        self._journal.record("policy", hostpid_namespace=namespace, why=policy.why, origin=policy.origin)

    def weigh(self, watchers: Mapping[str, int]) -> None:
        """Warn once if tenants' watchers contradict the policy; ``watchers`` counts containers by finding."""
        now, doubting = time.monotonic(), watchers.get(WatcherFinding.DOUBTS, 0)
        if watchers.get(WatcherFinding.CONFIRMS) or doubting < _DOUBTING:
            self._doubted_since = None
            return
        if self._doubted_since is None:
            self._doubted_since = now
        if not self._warned and now - self._doubted_since >= _DOUBTED_SECONDS:
            self._warned = True
            why = f"{contradiction(self.policy)}; or all {doubting} containers with such watchers use HAMi 2.4.1"
            why = f"{why} or CUDA_VISIBLE_DEVICES"
            self._journal.record("driver_contradicts_version", level="warning", why=why)
