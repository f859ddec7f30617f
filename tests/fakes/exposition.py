"""What Prometheus reads of a text, by Prometheus's own parsers."""

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Read:
    """The series of a text, by name and labels. A series that is there twice is a mistake."""

    def __init__(self, text: bytes) -> None:
        self.series: Series = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.series, f"twice: {key}"
                self.series[key] = sample.value

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (dict(has), value)
            for (whose, has), value in self.series.items()
            if whose == name and labels.items() <= dict(has).items()
        ]

    def one(self, name: str, **labels: str) -> float | None:
        """The value of the only such series; None if there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, found
        return found[0][1] if found else None
