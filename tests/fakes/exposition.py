"""Metrics in the text format, read by Prometheus's own parser."""

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Read:
    """Series by name and labels; a duplicate fails the test."""

    def __init__(self, text: bytes) -> None:
        self.series: Series = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.series, f"twice: {key}"
                self.series[key] = sample.value

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (dict(series_labels), value)
            for (series_name, series_labels), value in self.series.items()
            if series_name == name and labels.items() <= dict(series_labels).items()
        ]

    def one(self, name: str, **labels: str) -> float | None:
        """Return the value of the only such series; None without one."""
        matches = self.all(name, **labels)
        assert len(matches) <= 1, matches
        return matches[0][1] if matches else None
