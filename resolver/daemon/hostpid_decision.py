"""Decision in force on which number ``hostpid`` must be: the setting's or the driver version's."""

import time
from collections.abc import Mapping
from types import MappingProxyType

from resolver.base.journal import Journal
from resolver.config import HostpidNamespace
from resolver.hami.hostpid_policy import (
    HostpidPolicy,
    Origin,
    WatcherFinding,
    contradicted,
    contradiction,
    decide,
    shown,
)

#: Containers that doubt the policy, and seconds without one that confirms it, before a warning.
_DOUBTING, DOUBTED_SECONDS = 2, 30.0
#: Containers that must find samples by the same number, and none by the other, where nothing else decides.
_CONFIRMING = 2


class Decision:
    """Keeper of the ``policy`` in force.

    Watchers decide only where setting, machine and version don't: several containers, and none with other evidence,
    because a tenant can write any value.
    """

    def __init__(self, setting: HostpidNamespace, journal: Journal) -> None:
        self.policy = self._base = decide(setting, None)
        self._journal = journal
        self._logged = self._warned = False
        self._since: dict[WatcherFinding, float] = {}  # when watchers began to doubt, to contradict

    def decide(
        self, setting: HostpidNamespace, driver_version: str | None, *, vgpu: bool | None = False
    ) -> None:
        """Decide, and log a change; see `hostpid_policy.decide`."""
        base = decide(setting, driver_version, vgpu=vgpu)
        if not self._logged or self._base != base:
            self._base, self._logged, self._warned = base, True, False
            self._set(base)

    def _set(self, policy: HostpidPolicy) -> None:
        self.policy, self._since = policy, {}
        namespace = policy.namespace or "unknown"
        self._journal.record("policy", hostpid_namespace=namespace, why=policy.why, origin=policy.origin)

    def weigh(
        self, watchers: Mapping[str, int], numbers: Mapping[HostpidNamespace, int] = MappingProxyType({})
    ) -> None:
        """Take the watchers' evidence: containers by finding, and by the number with which a watcher found samples."""
        if self.policy.namespace is None and self._logged:
            ((namespace, containers),) = numbers.items() if len(numbers) == 1 else ((None, 0),)
            if namespace is not None and containers >= _CONFIRMING:
                self._set(shown(namespace, containers))
            return
        contradicting = watchers.get(WatcherFinding.CONTRADICTS, 0)
        doubting = contradicting + watchers.get(WatcherFinding.DOUBTS, 0)
        if watchers.get(WatcherFinding.CONFIRMS):
            contradicting = doubting = 0
        stops = (
            self._lasts(WatcherFinding.CONTRADICTS, contradicting) and self.policy.origin is not Origin.FORCED
        )
        if (self._lasts(WatcherFinding.DOUBTS, doubting) and not self._warned) or stops:
            self._warned = True
            others = (
                f"; or all {doubting} containers with such watchers use HAMi 2.4.1 or CUDA_VISIBLE_DEVICES"
            )
            effect = "; hostpid is not written until watchers show the right number" if stops else others
            why = contradiction(self.policy) + effect
            self._journal.record("driver_contradicts_version", level="warning", why=why)
        if stops:
            self._set(contradicted(self.policy, contradicting))

    def _lasts(self, finding: WatcherFinding, containers: int) -> bool:
        """Check if several containers have shown this for long enough."""
        now = time.monotonic()
        if containers < _DOUBTING:
            self._since.pop(finding, None)
            return False
        return now - self._since.setdefault(finding, now) >= DOUBTED_SECONDS
