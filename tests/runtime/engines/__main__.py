"""`make engines`: starts the real container engines of a Debian and tries `resolver` on each.

    make engines                             every engine of Debian 12, with each view of the cgroup hierarchies
    make engines ARGS="--suite trixie"       those of Debian 13
    make engines ARGS="--check -k docker"    some of them (pytest's -k); --check writes nothing

The engines come from a Debian in $XDG_CACHE_HOME/resolver-engines, which is made once (a minute): this machine gets no
package of theirs. What was seen goes into docs/runtimes.json and the table of docs/compatibility.md.

Exit status: 0 if every engine was as it has to be, 1 if one was not, 2 if this machine lacks something (which is said).
"""

import argparse
import datetime as dt
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.runtime.debian import Missing
from tests.runtime.engines import debian, report
from tests.runtime.engines.report import Row


class Rows:
    """A plugin of pytest: the rows of the tests that passed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.rows += [value for name, value in report.user_properties if name == "row"]  # type: ignore[misc]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="make engines", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--suite", default=debian.SUITES[0], choices=debian.SUITES, help="Debian's release")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only tests that pytest's -k selects")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("engines: it makes namespaces and containers, and needs root", file=sys.stderr)
        return 2
    print(f"engines: Debian {options.suite}, made once in a minute", file=sys.stderr, flush=True)
    try:
        versions = debian.versions(debian.root(options.suite))
    except Missing as error:
        print(f"engines: {error}", file=sys.stderr)
        return 2
    os.environ["ENGINES_SUITE"] = options.suite
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its children, too
    told = Rows()
    words = ["--no-header", "-q", str(Path(__file__).parent), *(("-k", options.k) if options.k else ())]
    status = pytest.main(words, plugins=[told])
    seen = {
        "suite": options.suite,
        "kernel": os.uname().release,
        "seen": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
    }
    rows = [{**row, **seen} for row in told.rows]
    print(*report.table(rows), sep="\n")
    if status == 0 and not options.check:
        report.publish(options.suite, versions, rows)
    return 0 if status == 0 and rows else 1


if __name__ == "__main__":
    sys.exit(main())
