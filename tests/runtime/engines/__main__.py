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
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.runtime.debian import Missing
from tests.runtime.engines import debian, report
from tests.runtime.engines.report import Row


class Rows:
    """A plugin of pytest: the rows that tests told which passed to their end, and the tests that should have."""

    def __init__(self) -> None:
        self.seen: dict[str, Row] = {}
        self.expected: list[str] = []
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expected = [item.nodeid for item in session.items if "tell" in getattr(item, "fixturenames", ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        (self.passed if report.passed else self.failed).add(report.nodeid)
        for name, value in report.user_properties:
            if name == "row":
                self.seen[report.nodeid] = json.loads(str(value))

    def rows(self, suite: str) -> list[Row]:
        seen = {"suite": suite, "kernel": os.uname().release, "seen": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"}
        return [
            {**self.seen[each], **seen}
            for each in self.expected
            if each in self.seen and each not in self.failed
        ]

    def missing(self) -> list[str]:
        return [each for each in self.expected if each not in self.seen or each in self.failed]


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
    rows = Rows()
    words = ["--no-header", "-q", str(Path(__file__).parent), *(("-k", options.k) if options.k else ())]
    status = pytest.main(words, plugins=[rows])
    seen = rows.rows(options.suite)
    print(*report.table(seen), sep="\n")
    for each in rows.missing():
        print(f"engines: no row of {each}: it failed", file=sys.stderr)
    if not options.check and not rows.missing() and status == 0:
        report.publish(options.suite, versions, seen)
    return 0 if status == 0 and seen and not rows.missing() else 1


if __name__ == "__main__":
    sys.exit(main())
