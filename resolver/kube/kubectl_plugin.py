#!/usr/bin/env python3
"""kubectl resolver: ask the resolver daemons of a cluster, each on its node, by kubectl itself.

  kubectl resolver status                     a line for each node
  kubectl resolver doctor                     the same, with the checks that are not ok
  kubectl resolver top                        who uses the GPUs, node by node
  kubectl resolver lookup POD PID             the host PID of a PID in a container of POD
  kubectl resolver explain POD                where the chain from POD's processes to its utilization breaks
  kubectl resolver top POD                    who uses the GPUs of POD
  kubectl resolver bundle POD                 what a bug report needs, from POD's node, into a file here
  kubectl resolver doctor|slots|... POD       the command on POD's node; with --node NODE on that one

POD is NAME, with -n NAMESPACE, or NAMESPACE/NAME. What follows -- goes to the resolver command as it is.

One file, for Python 3.10 and later, with nothing but its standard library: it may be copied to where kubectl is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: As the chart and the kustomization have them.
SELECTOR, CONTAINER = "app.kubernetes.io/name=resolver", "resolver"
_AT_ONCE = 16
#: How a line of kubectl's own log begins.
_KLOG = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.")
#: What kubectl prints when the program in the container ended otherwise than with 0.
_ENDED = re.compile(r"(?m)^command terminated with exit code (\d+)\n?")
_DOCTOR_SECONDS = 180.0
EXIT_WRONG, EXIT_USAGE, EXIT_CANNOT_KNOW = 1, 2, 4


class Trouble(Exception):
    """A sentence for the user, and the exit code."""

    def __init__(self, text: str, code: int = EXIT_CANNOT_KNOW) -> None:
        super().__init__(text)
        self.code = code


class DaemonPod(NamedTuple):
    """A daemon's pod. ``why`` says why it cannot be asked; empty if it can."""

    node: str
    namespace: str
    pod: str
    why: str


class Completed(NamedTuple):
    """What a command in a pod printed. ``why`` says why there is none: kubectl did not get there, or not in time."""

    code: int
    out: str
    err: str
    why: str


class Kubectl:
    """The program, with the options that choose the cluster."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.argv = [os.environ.get("KUBECTL", "kubectl")]
        for name in ("context", "kubeconfig"):
            if getattr(args, name, None):
                self.argv.append(f"--{name}={getattr(args, name)}")

    def get(self, *words: str) -> Any:
        """The JSON of ``kubectl get``; `Trouble` with kubectl's own words."""
        try:
            done = subprocess.run(
                [*self.argv, "get", *words, "-o", "json"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except FileNotFoundError:
            raise Trouble(f"there is no {self.argv[0]} on PATH") from None
        except subprocess.TimeoutExpired:
            raise Trouble("the API server does not answer within 60 s") from None
        if done.returncode:
            missing = "(NotFound)" in done.stderr
            # kubectl repeats a failed connection in lines of its own log (klog) before it says what is wrong.
            lines = [line for line in done.stderr.splitlines() if not _KLOG.match(line)]
            why = "\n".join(lines).strip() or "kubectl failed"
            if missing:
                raise Trouble(why, EXIT_WRONG)
            raise Trouble(f"{why} (which cluster is asked: kubectl config current-context)", EXIT_CANNOT_KNOW)
        return json.loads(done.stdout)

    def exec(self, daemon: DaemonPod, command: list[str], *flags: str) -> list[str]:
        """The command line that runs ``resolver COMMAND`` in a pod."""
        where = ["-n", daemon.namespace, daemon.pod, "-c", CONTAINER]
        return [*self.argv, "exec", *flags, *where, "--", "resolver", *command]

    def ask(self, daemon: DaemonPod, command: list[str], seconds: float) -> Completed:
        """Run it to its end, or for that long at most."""
        if daemon.why:
            return Completed(code=-1, out="", err="", why=daemon.why)
        running = subprocess.Popen(
            self.exec(daemon, command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return Completed(code=-1, out="", err="", why=f"no answer within {seconds:g} s")
        ended = _ENDED.search(err)
        if running.returncode and not ended:
            last = (err.strip().splitlines() or ["kubectl failed"])[-1]
            return Completed(code=-1, out=out, err=err, why=f"unreachable: {last}")
        return Completed(code=int(ended[1]) if ended else 0, out=out, err=_ENDED.sub("", err), why="")


def daemons(kubectl: Kubectl, selector: str) -> dict[str, DaemonPod]:
    """The daemon of each node: the one that runs, where an update has two of them."""
    found: dict[str, tuple[int, DaemonPod]] = {}
    for pod in kubectl.get("pods", "--all-namespaces", "--selector", selector)["items"]:
        names = [container["name"] for container in pod["spec"]["containers"]]
        node = pod["spec"].get("nodeName")
        if CONTAINER not in names or not node:
            continue
        rank, why = _state_of(pod)
        known = found.get(node)
        if known is None or rank > known[0]:
            found[node] = (
                rank,
                DaemonPod(
                    node=node, namespace=pod["metadata"]["namespace"], pod=pod["metadata"]["name"], why=why
                ),
            )
    if not found:
        raise Trouble(
            f"no daemon's pod in this cluster has the label {selector} and a container {CONTAINER}: is it installed? "
            "Beside HAMi's monitor its pods have HAMi's labels: give --selector"
        )
    return {node: daemon for node, (_, daemon) in sorted(found.items())}


def _state_of(pod: dict[str, Any]) -> tuple[int, str]:
    """How good it is to ask, and why it cannot be asked at all."""
    status: dict[str, Any] = next(
        (s for s in pod["status"].get("containerStatuses", ()) if s["name"] == CONTAINER), {}
    )
    if "running" in status.get("state", {}):
        leaving = "deletionTimestamp" in pod["metadata"]
        return 1 + 2 * bool(status.get("ready")) + (not leaving), ""
    waiting = status.get("state", {}).get("waiting") or status.get("state", {}).get("terminated") or {}
    return (
        0,
        f"pod {pod['metadata']['name']} is {waiting.get('reason') or pod['status'].get('phase', 'unknown')}",
    )


# ---- one node -----------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A pod of a user's."""

    name: str
    uid: str
    node: str
    containers: dict[str, str]  # name: id with its scheme, empty before it was started
    default: str


def target(kubectl: Kubectl, text: str, namespace: str | None) -> Target:
    """The pod that is called so. `Trouble` if it is not there, or not on a node."""
    in_namespace, _, name = text.rpartition("/")
    namespace = in_namespace or namespace
    pod = kubectl.get("pod", name, *(("-n", namespace) if namespace else ()))
    node = pod["spec"].get("nodeName")
    if not node:
        raise Trouble(f"pod {name} is on no node yet", EXIT_WRONG)
    about, status = pod["metadata"], pod["status"]
    listed = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    annotations = about.get("annotations", {})
    # The node knows a static pod by the hash of its file; its mirror in the API server has a UID of its own.
    uid = annotations.get("kubernetes.io/config.mirror") or about["uid"]
    ids = {each["name"]: each.get("containerID", "") for each in listed}
    default = annotations.get("kubectl.kubernetes.io/default-container", "")
    return Target(name=f"{about['namespace']}/{name}", uid=uid, node=node, containers=ids, default=default)


def container_of(pod: Target, wanted: str | None) -> str:
    """The id of the chosen container."""
    names = list(pod.containers)
    name = wanted or pod.default or (names[0] if len(names) == 1 else "")
    if name not in pod.containers:
        raise Trouble(
            f"which container of {pod.name}? Give -c: {', '.join(names) or 'it has none yet'}", EXIT_USAGE
        )
    if not pod.containers[name]:
        raise Trouble(f"container {name} of {pod.name} has not started", EXIT_WRONG)
    return pod.containers[name]


def on_node(kubectl: Kubectl, args: argparse.Namespace, node: str) -> DaemonPod:
    """The daemon there."""
    known = daemons(kubectl, args.selector)
    if node not in known:
        raise Trouble(f"no daemon runs on node {node}; there is one on: {', '.join(known)}")
    if known[node].why:
        raise Trouble(f"the daemon on node {node} cannot be asked: {known[node].why}")
    return known[node]


def passed_on(kubectl: Kubectl, daemon: DaemonPod, command: list[str]) -> int:
    """The command there, as if it ran here; with a terminal if there is one."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return subprocess.call(kubectl.exec(daemon, command, "-i", "-t"))
    done = subprocess.run(
        kubectl.exec(daemon, command), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    sys.stderr.write(_ENDED.sub("", done.stderr.decode("utf-8", "replace")))
    return done.returncode


def into_file(kubectl: Kubectl, daemon: DaemonPod, command: list[str], path: str) -> int:
    """What the command prints, into a new file of this user's alone."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise Trouble(f"{path} cannot be made ({error.strerror})", EXIT_USAGE) from None
    try:
        done = subprocess.run(
            kubectl.exec(daemon, command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(file)
    sys.stderr.write(_ENDED.sub("", done.stderr.decode("utf-8", "replace")))
    if done.returncode:
        os.unlink(path)
        return done.returncode
    print(path)
    return 0


# ---- every node ---------------------------------------------------------------------------------------------------


def everywhere(
    kubectl: Kubectl, args: argparse.Namespace, command: list[str], seconds: float
) -> dict[DaemonPod, Completed]:
    """The answers of all nodes, asked beside each other; a slow one costs the others nothing."""
    known = daemons(kubectl, args.selector)
    seconds = args.timeout or seconds
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda daemon: kubectl.ask(daemon, command, seconds), known.values())
        return dict(zip(known.values(), answers, strict=True))


def _document(answer: Completed) -> tuple[Any, str]:
    """The JSON, or why there is none."""
    if answer.why:
        return None, answer.why
    try:
        return json.loads(answer.out), ""
    except ValueError:
        said = answer.err.strip().splitlines() or [f"it ended with {answer.code}"]
        return None, said[-1]


def status(kubectl: Kubectl, args: argparse.Namespace) -> int:
    """A line a node."""
    rows, documents, wrong = [], [], 0
    for daemon, answer in everywhere(kubectl, args, ["status", "--json"], 15.0).items():
        daemon_status, why = _document(answer)
        documents.append(
            {
                "node": daemon.node,
                "pod": f"{daemon.namespace}/{daemon.pod}",
                "status": daemon_status,
                "error": why,
            }
        )
        if daemon_status is None:
            wrong += 1
            rows.append([daemon.node, "?", "-", "-", "-", "-", "-", "-", "-", why])
            continue
        source, totals, driver = (daemon_status[key] for key in ("source", "totals", "driver"))
        troubles = [
            source["not_ready"],
            driver["error"] and f"NVML: {driver['error']}",
            daemon_status["dry_run"] and "dry run",
        ]
        wrong += bool(source["not_ready"])
        rows.append(
            [
                daemon.node,
                "no" if source["not_ready"] else "yes",
                daemon_status["version"],
                source["name"],
                f"{driver['gpus']}"
                + (f" ({driver['gpus_unhealthy']} ill)" if driver["gpus_unhealthy"] else ""),
                totals["containers"],
                totals["slots"],
                totals["slots_repaired"],
                totals["slots_unresolved"],
                "; ".join(str(each) for each in troubles if each) or "-",
            ]
        )
    if args.json:
        print(json.dumps(documents, indent=2))
    else:
        head = [
            "NODE",
            "READY",
            "VERSION",
            "SOURCE",
            "GPUS",
            "CONTAINERS",
            "SLOTS",
            "REPAIRED",
            "UNRESOLVED",
            "TROUBLE",
        ]
        _table(head, rows)
    return EXIT_WRONG if wrong else 0


def doctor(kubectl: Kubectl, args: argparse.Namespace) -> int:
    """A line a node, and below it what is not ok."""
    rows, below, failed, documents = [], [], False, []
    for daemon, answer in everywhere(
        kubectl, args, ["doctor", "--json", *args.rest], _DOCTOR_SECONDS
    ).items():
        checks, why = _document(answer)
        documents.append({"node": daemon.node, "checks": checks, "error": why})
        if checks is None:
            failed = True
            rows.append([daemon.node, "-", "-", "-", "-", why])
            continue
        counts = {state: [c["check"] for c in checks if c["state"] == state] for state in _STATES}
        failed = failed or bool(counts["failed"])
        bad = [f"{state}: {', '.join(counts[state])}" for state in reversed(_STATES[1:]) if counts[state]]
        numbers = [str(len(counts[state])) for state in _STATES]
        rows.append([daemon.node, *numbers, "; ".join(bad) or "-"])
        below += [f"kubectl resolver doctor --node {daemon.node}"] if bad else []
    if args.json:
        print(json.dumps(documents, indent=2))
        return EXIT_WRONG if failed else 0
    _table(["NODE", "OK", "WARNING", "UNKNOWN", "FAILED", "CHECKS"], rows)
    if below:
        print(f"causes and fixes: {below[0]}", file=sys.stderr)
    return EXIT_WRONG if failed else 0


_STATES = ("ok", "warning", "unknown", "failed")


def top(kubectl: Kubectl, args: argparse.Namespace) -> int:
    """Every node's, one after the other."""
    wrong = False
    for daemon, answer in everywhere(kubectl, args, ["top", "--once", *args.rest], 15.0).items():
        print(
            f"node {daemon.node}"
            + (f": {answer.why or answer.err.strip()}" if answer.why or answer.code else "")
        )
        print(answer.out)
        wrong = wrong or bool(answer.why or answer.code)
    return EXIT_WRONG if wrong else 0


def _table(head: list[str], rows: list[list[Any]]) -> None:
    texts = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*texts, strict=True)]
    for row in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# ---- the command line ---------------------------------------------------------------------------------------------

_CLUSTER: dict[str, Callable[[Kubectl, argparse.Namespace], int]] = {
    "status": status,
    "doctor": doctor,
    "top": top,
}
#: Of these POD is what it is about, not only where.
_ABOUT_POD = ("lookup", "explain")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-n", "--namespace", help="of POD")
    common.add_argument("--context", help="kubectl's")
    common.add_argument("--kubeconfig", help="kubectl's")
    common.add_argument(
        "--selector", default=SELECTOR, help=f"the labels of the daemons' pods (default: {SELECTOR})"
    )
    common.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="for each node (default: 15; doctor: 180)"
    )
    parser = argparse.ArgumentParser(
        prog="kubectl resolver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (
        "status",
        "doctor",
        "top",
        "slots",
        "containers",
        "events",
        "devices",
        "config",
        "version",
        "bundle",
    ):
        below = commands.add_parser(name, parents=[common], help=f"resolver {name}")
        below.add_argument("pod", nargs="?", metavar="POD", help="on the node of this pod")
        below.add_argument("--node", help="on this node")
        if name == "bundle":
            below.add_argument(
                "-o", "--output", metavar="FILE", help="default: resolver-bundle-NODE-TIME.tar.gz"
            )
            below.add_argument("--redact", action="store_true", help="replace names by pseudonyms")
        else:
            below.add_argument("--json", action="store_true", help="JSON")
    for name in _ABOUT_POD:
        below = commands.add_parser(name, parents=[common], help=f"resolver {name}")
        below.add_argument("pod", metavar="POD")
        if name == "lookup":
            below.add_argument("pid", metavar="PID", type=int, help="as the container sees it")
        below.add_argument(
            "-c", "--container", help="of the pod; default: its default container, or its only one"
        )
        below.add_argument("--json", action="store_true", help="JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit code: that of the command; 1 something is wrong, 2 usage, 4 kubectl or a daemon could not be asked."""
    words = sys.argv[1:] if argv is None else argv
    here, rest = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    args = _parser().parse_args(here)
    args.rest = rest
    try:
        return _run(args)
    except Trouble as trouble:
        print(f"kubectl resolver: {trouble}", file=sys.stderr)
        return trouble.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _run(args: argparse.Namespace) -> int:
    kubectl = Kubectl(args)
    as_json = ["--json"] if getattr(args, "json", False) else []
    if args.command in _ABOUT_POD:
        pod = target(kubectl, args.pod, args.namespace)
        daemon = on_node(kubectl, args, pod.node)
        if args.command == "lookup":
            words = [container_of(pod, args.container), str(args.pid)]
        else:
            words = [f"{pod.uid}/{args.container}" if args.container else pod.uid]
        return passed_on(kubectl, daemon, [args.command, *words, *as_json, *args.rest])
    pod_there = target(kubectl, args.pod, args.namespace) if args.pod else None
    node = args.node or (pod_there.node if pod_there else "")
    if not node:
        if args.command not in _CLUSTER:
            raise Trouble(f"{args.command} is of one node: give POD or --node NODE", EXIT_USAGE)
        return _CLUSTER[args.command](kubectl, args)
    daemon = on_node(kubectl, args, node)
    if args.command == "bundle":
        path = (
            args.output or f"resolver-bundle-{node}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
        )
        redact = ["--redact"] if args.redact else []
        return into_file(kubectl, daemon, ["bundle", "-o", "-", *redact, *args.rest], path)
    only = [pod_there.uid] if pod_there and args.command == "top" else []
    return passed_on(kubectl, daemon, [args.command, *only, *as_json, *args.rest])


if __name__ == "__main__":
    sys.exit(main())
