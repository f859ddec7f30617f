"""``make soak ARGS=30m``: a node that never rests, on which the daemon's memory and descriptors must not grow.

Containers come, go and restart, processes fork, clients ask, and a quarter of the time a tenant attacks, another way
each time (`tests.bench.attacks`, at small sizes). In the first quarter each round ends with a restart or a takeover;
then one daemon runs to the end. Each round ends without load, and with a line: memory, descriptors, the longest block
of the loop in the round, and the results of the good clients.

Exit code 1 if a value was wrong, or if memory or descriptors of the last daemon grew after the first turn of each
attack: Python keeps the memory of that turn and reuses it. Growth counts only after three turns of each attack, some
22m. The program always ends by itself.
"""

import argparse
import itertools
import os
import sys
import time
from typing import Final, NamedTuple

from resolver.config import parse_duration
from tests.bench.attacks import ATTACKS
from tests.bench.hostile import Good, Stage, most, open_directory, repair_for, wrong_values
from tests.bench.usage import children, rss

#: Attacks in turn, at their first size: small enough to run for hours.
_ROUNDS: Final = tuple(
    (name, attack.sizes[0])
    for name, attack in ATTACKS.items()
    if name not in ("nothing", "swollen", "tree-swollen", "named", "all")
)
_CALM_SECONDS, _ATTACK_SECONDS, _QUIET_SECONDS = 7.0, 5.0, 3.0
#: Allowed growth from the second to the last round of attacks.
_MOST_MIB, _MOST_DESCRIPTORS = 3.0, 4


class Weight(NamedTuple):
    """The daemon's use of resources while nothing happens."""

    mib: float
    of_children: float
    descriptors: int


class Soak:
    """One run. ``troubles`` are the wrong values that were seen."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.others = [Good(stage.node, f"good-{number}") for number in range(3)]
        self.daemon = stage.daemon
        self.began = time.monotonic()
        self.troubles: list[str] = []
        self.life: list[Weight] = []
        self._lives = 0

    def run(self, seconds: float) -> None:
        print(
            f"{'s':>6} {'MiB':>6} {'child':>6} {'fds':>4} {'block':>7} {'repair':>7} {'API':>7} "
            f"{'scrape':>7}  attack, and what was done to the daemon",
            flush=True,
        )
        rounds = itertools.cycle(_ROUNDS)
        restarting = True
        while (gone := time.monotonic() - self.began) < seconds:
            said = ""
            if restarting:
                restarting = gone < seconds / 4
                said = self._replace(takes_over=restarting and self._lives % 2 == 0)
                self.life = []
            name, size = next(rounds)
            self._round(name, size, said)

    def _round(self, name: str, size: int, said: str) -> None:
        stage, clients = (
            self.stage,
            [self.stage.root_client(), self.stage.client("scrape", str(self.stage.port))],
        )
        self.daemon.reset_longest()
        since = {id(good): len(good.samples) for good in (stage.good, *self.others)}
        self._churn(_CALM_SECONDS)
        with ATTACKS[name].begin(stage.scene, size):
            self._repair(_ATTACK_SECONDS)
        for client in clients:
            client.end()
        time.sleep(_QUIET_SECONDS)
        block, weight = self.daemon.longest_block(), self._weigh()
        self.life.append(weight)
        repairs = [each for good in (stage.good, *self.others) for each in good.samples[since[id(good)] :]]
        api, scrapes = (client.samples for client in clients)
        self.troubles += wrong_values(repairs, api)
        print(
            f"{time.monotonic() - self.began:6.0f} {weight.mib:6.1f} {weight.of_children:6.1f} {weight.descriptors:4} "
            f"{block * 1e3:5.0f}ms {most(repairs):5.2f} s {most(api):5.2f} s "
            f"{most(scrapes):5.2f} s  {ATTACKS[name].name(size)}{said}",
            flush=True,
        )

    def _churn(self, seconds: float) -> None:
        """A container restarts with its processes, another one comes and goes, and all the time processes do."""
        until = time.monotonic() + seconds
        for good in itertools.cycle(self.others):
            if time.monotonic() > until:
                return
            good.restart()
            passing = Good(self.stage.node, "passing")
            self._repair(1.0, passing)
            passing.end()

    def _repair(self, seconds: float, *more: Good) -> None:
        repair_for((self.stage.good, *self.others, *more), seconds)

    def _replace(self, *, takes_over: bool) -> str:
        """End the daemon and start another, or let another take over."""
        self._lives += 1
        if takes_over:
            successor = self.stage.start("--wait", number=self._lives)
            successor.wait_for("waiting")
        if self.daemon.stopped_after() is None:
            self.troubles.append("the daemon did not end within 20 s of SIGTERM")
        if takes_over:
            successor.wait_for("took_over")
        else:
            successor = self.stage.start(number=self._lives)
        self.stage.adopt(successor)
        successor.wait_until_it_listens()
        self.daemon = successor
        return "; another took over" if takes_over else "; restarted"

    def _weigh(self) -> Weight:
        pid = self.daemon.process.pid
        return Weight(rss(pid), sum(map(rss, children(pid))), len(os.listdir(f"/proc/{pid}/fd")))

    def grown(self) -> list[str]:
        """Return a sentence for each resource of which the last daemon took ever more."""
        if len(self.life) < 3 * len(_ROUNDS):
            print(
                "make soak: too short to say whether anything grew: that takes each attack three times, some 22m"
            )
            return []
        first, last = self.life[len(_ROUNDS) : 2 * len(_ROUNDS)], self.life[-len(_ROUNDS) :]
        mib = min(each.mib for each in last) - min(each.mib for each in first)
        descriptors = min(each.descriptors for each in last) - min(each.descriptors for each in first)
        found = [f"memory grew by {mib:.1f} MiB"] if mib > _MOST_MIB else []
        return found + (
            [f"{descriptors} descriptors were left open"] if descriptors > _MOST_DESCRIPTORS else []
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("duration", nargs="?", default="30m", help="such as 90s, 30m (default 30m)")
    args = parser.parse_args()
    try:
        seconds = parse_duration(args.duration)
    except ValueError as error:
        parser.error(str(error))
    if os.geteuid() != 0:
        print("make soak: it makes PID and mount namespaces, so it needs root", file=sys.stderr)
        return 2
    # Everywhere: one of the attacks is in the directories of another scheduler.
    with open_directory() as scratch, Stage(scratch, everywhere=True) as stage:
        soak = Soak(stage)
        soak.run(seconds)
    troubles = soak.troubles + soak.grown()
    print(
        "\n".join(f"make soak: {each}" for each in troubles) or "make soak: nothing grew, no value was wrong"
    )
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
