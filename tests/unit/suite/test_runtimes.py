"""The table of container engines is made of what was seen, and says what is in it."""

from __future__ import annotations

from tests.runtime.engines import report
from tests.runtime.engines.report import put_table


def test_the_page_has_the_tables_of_the_rows() -> None:
    page = report.PAGE.read_text()
    assert page == put_table(page, report.load())
