"""The table of container engines is made of what was seen, and says what is in it."""

from __future__ import annotations

from tests.runtime.engines import report
from tests.runtime.engines.report import Row, merge, put_table, table

ROW: Row = {
    "engine": "Docker",
    "how": "plain",
    "cgroups": "v1",
    "suite": "bookworm",
    "ids": ["docker ps"],
    "not_by": ["--name"],
    "cgroup": "/docker/<id>",
    "containers": "listed",
    "reverse": "right",
    "repair": "right",
}


def test_the_page_has_the_tables_of_the_rows() -> None:
    page = report.PAGE.read_text()
    assert page == put_table(page, report.load())


def test_rows_that_differ_in_hierarchies_alone_are_one_line() -> None:
    other = {**ROW, "cgroups": "v2"}
    worse = {**ROW, "cgroups": "hybrid", "repair": "wrong"}
    *_, both, alone = table([ROW, other, worse]).splitlines()
    assert both == ("| Docker | plain | v1, v2 | `/docker/<id>` | found | listed | right | right |")
    assert "| hybrid |" in alone
    assert alone.endswith("| wrong |")


def test_what_is_seen_again_replaces_what_was_seen_and_the_rest_stays() -> None:
    other = {**ROW, "cgroups": "v2"}
    assert merge([ROW, other], [{**ROW, "repair": "new"}]) == [{**ROW, "repair": "new"}, other]
