"""Decides which number ``hostpid`` must be, again whenever more is known about the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resolver.hami.hostpid_policy import Origin, decide

if TYPE_CHECKING:
    from resolver.base.journal import Journal
    from resolver.config import HostpidNamespace
    from resolver.daemon.driver_measurement import DriverMeasurement
    from resolver.gpu.sampler import Collection


class Decision:
    """The policy in force, and the measurement behind it."""

    def __init__(self, setting: HostpidNamespace, measurement: DriverMeasurement, journal: Journal) -> None:
        self.policy = decide(setting, None)
        self.measurement = measurement
        self._journal = journal
        self._said = False

    def decide(self, setting: HostpidNamespace, driver_version: str | None) -> bool:
        """Decide; return True if that changed anything."""
        measured, unable = self.measurement.get(driver_version), self.measurement.unable
        policy = decide(setting, driver_version, measured, unable)
        if self._said and self.policy == policy:
            return False
        self.policy, self._said = policy, True
        namespace = policy.namespace or "unknown"
        self._journal.record("policy", hostpid_namespace=namespace, why=policy.why, origin=policy.origin)
        return True

    def measured(self, driver_version: str | None) -> bool:
        """Return True once after that driver was measured: the rights for it can go."""
        if not driver_version or self.policy.origin is not Origin.MEASURED or not self.measurement.rights:
            return False
        self.measurement.disable(driver_version)
        return True

    def consider(self, collection: Collection) -> None:
        """Start a measurement if it could matter and there is something to measure."""
        if self.policy.origin is not Origin.FORCED:
            self.measurement.consider(collection)

    def not_measured(self) -> str:
        """Explain why the policy does not come from a measurement; empty if it does, or need not."""
        if self.policy.origin in (Origin.MEASURED, Origin.FORCED):
            return ""
        return self.measurement.unable or self.measurement.why
