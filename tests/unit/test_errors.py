"""The tree drawn over the errors is the tree of the classes."""

from __future__ import annotations

import re

from resolver import errors
from resolver.errors import AccessDenied, Ambiguous, CannotKnow, RegionRejected, ResolverError, WorkerFailed
from resolver.reasons import RegionReason


def drawn() -> dict[str, str]:
    """``{class: its base}`` by the indentation of the drawing."""
    tree: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4}[ |]*?)(?:\+-- )?(?=[A-Z])(\w+) {2,}", line)
        if not match:
            continue
        depth = match.start(2)
        while path and path[-1][0] >= depth:
            path.pop()
        tree[match[2]] = path[-1][1] if path else "Exception"
        path.append((depth, match[2]))
    return tree


def test_the_drawing_shows_every_class_under_its_base() -> None:
    classes = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert drawn() == classes
    assert len(classes) >= 8


def test_what_the_errors_carry() -> None:
    assert issubclass(AccessDenied, CannotKnow)
    assert Ambiguous("two fit", ("a", "b")).candidates == ("a", "b")
    rejected = RegionRejected(RegionReason.SYMLINK, "it is a link")
    assert (rejected.reason, rejected.detail, str(rejected)) == (
        RegionReason.SYMLINK,
        "it is a link",
        "it is a link",
    )
    plain = WorkerFailed("it died")
    assert (plain.waiting, plain.own_fault, isinstance(plain, ResolverError)) == (False, False, True)
