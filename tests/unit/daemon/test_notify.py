"""The daemon's status line in systemd."""

from resolver.daemon.notify import summary
from tests.fakes.pictures import picture


def test_status_line_has_at_most_100_characters() -> None:
    assert summary(picture()).startswith("source ")
    long = summary(
        picture(
            passed_at=1.7e9, missing_dirs=tuple(f"/usr/local/vgpu/containers-{number}" for number in range(9))
        )
    )
    assert len(long) <= 100
    assert long.endswith(": see resolver status")
