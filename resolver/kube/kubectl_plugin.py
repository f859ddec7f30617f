#!/usr/bin/env python3
"""kubectl resolver: ask the resolver daemons of a cluster, each on its node, through kubectl.

  kubectl resolver status                     a line for each node
  kubectl resolver explain POD                where the chain from POD's processes to its utilization breaks
  kubectl resolver lookup POD PID             the host PID of a PID in a container of POD
  kubectl resolver reverse HOST_PID --node NODE   the container and the PID there
  kubectl resolver top POD                    GPU use of POD
  kubectl resolver bundle POD > FILE          the parts of a bug report, from POD's node
  kubectl resolver COMMAND POD                any command on POD's node; with --node NODE on that one

POD is NAME, with -n NAMESPACE, or NAMESPACE/NAME. Arguments after -- go to the resolver command unchanged.

One file for Python 3.10 and later that needs only the standard library: copy it to the machine with kubectl.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

#: As the chart and the kustomization have them.
SELECTOR, CONTAINER = "app.kubernetes.io/name=resolver", "resolver"
COMMANDS = (
    *("status", "explain", "lookup", "reverse", "top", "bundle"),
    *("doctor", "slots", "containers", "events", "devices", "config"),
)
#: `make tables` writes it, because a copy is alone.
VERSION = "0.2.0"
#: kubectl's own options.
_KUBECTL = ("as", "cluster", "context", "kubeconfig")
_AT_ONCE = 16
#: kubectl's last line when the program in the container did not end with 0.
_ENDED = re.compile(r"(?m)^command terminated with exit code (\d+)\n?")
EXIT_WRONG, EXIT_USAGE, EXIT_CANNOT_KNOW = 1, 2, 4


class Trouble(Exception):
    """A sentence for the user, and the exit code."""

    def __init__(self, text: str, code: int = EXIT_CANNOT_KNOW) -> None:
        super().__init__(text)
        self.code = code


class DaemonPod(NamedTuple):
    """A daemon's pod. ``why`` explains why the daemon cannot be asked; empty if it can."""

    node: str
    namespace: str
    pod: str
    why: str


class Kubectl:
    """The kubectl program, for the chosen cluster."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.argv = [os.environ.get("KUBECTL", "kubectl")]
        given = {name: getattr(args, name) for name in _KUBECTL}
        self.argv += [f"--{name}={value}" for name, value in given.items() if value]

    def get(self, *words: str) -> Any:
        """Return the JSON of ``kubectl get``. Raises `Trouble` with kubectl's words."""
        command = [*self.argv, "get", *words, "-o", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            raise Trouble(f"there is no {self.argv[0]} on PATH") from None
        except subprocess.TimeoutExpired:
            raise Trouble("the API server does not answer within 60 s") from None
        if not done.returncode:
            return json.loads(done.stdout)
        why = _last_line(done.stderr, "kubectl failed")  # after its log of failed connections
        if "(NotFound)" in why:
            raise Trouble(why, EXIT_WRONG)
        raise Trouble(f"{why} (the cluster: kubectl config current-context)")

    def exec(self, daemon: DaemonPod, command: list[str], *flags: str) -> list[str]:
        """Return the command line that runs ``resolver COMMAND`` in a pod."""
        where = ["-n", daemon.namespace, daemon.pod, "-c", CONTAINER]
        return [*self.argv, "exec", *flags, *where, "--", "resolver", *command]

    def status(self, daemon: DaemonPod, seconds: float) -> tuple[Any, str]:
        """Return a daemon's status, or None and the reason."""
        if daemon.why:
            return None, daemon.why
        pipe = subprocess.PIPE
        command = self.exec(daemon, ["status", "--json"])
        # A new session: kubectl may be a script, and all of it has to end.
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            out, err = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return None, f"no answer within {seconds:g} s"
        last = _last_line(_ENDED.sub("", err), "no answer")
        if running.returncode and not _ENDED.search(err):
            return None, f"unreachable: {_missing_right(err, daemon) or last}"
        try:
            return json.loads(out), ""
        except ValueError:
            return None, last


def _missing_right(message: str, daemon: DaemonPod) -> str:
    """Return how to get the right that kubectl reports as missing; empty if it is another error."""
    if "(Forbidden)" not in message or "pods/exec" not in message:
        return ""
    return (
        f"you lack the right to create pods/exec in the namespace {daemon.namespace}: an administrator gives it by "
        "deploy/kubectl-rbac.yaml"
    )


def _last_line(text: str, otherwise: str) -> str:
    return _printable((text.strip().splitlines() or [otherwise])[-1])


def _printable(text: str) -> str:
    """Escape control characters except line ends: a pod chooses its words, and terminals obey them."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def daemons(kubectl: Kubectl, selector: str, namespace: str | None) -> dict[str, DaemonPod]:
    """Return each node's daemon, the running one during an update.

    Any user can make a pod with these labels, so it must belong to a DaemonSet, and all of them to one namespace.
    """
    nodes: dict[str, tuple[int, DaemonPod]] = {}
    place = ["--namespace", namespace] if namespace else ["--all-namespaces"]
    for pod in kubectl.get("pods", *place, "--selector", selector)["items"]:
        names = [container["name"] for container in pod["spec"]["containers"]]
        node, about = pod["spec"].get("nodeName"), pod["metadata"]
        owners = [owner["kind"] for owner in about.get("ownerReferences", ()) if owner.get("controller")]
        if CONTAINER not in names or not node or owners != ["DaemonSet"]:
            continue
        rank, why = _state_of(pod)
        if node not in nodes or rank > nodes[node][0]:
            daemon = DaemonPod(node=node, namespace=about["namespace"], pod=about["name"], why=why)
            nodes[node] = rank, daemon
    if not nodes:
        raise Trouble(
            f"no DaemonSet's pod in {namespace or 'this cluster'} has the label {selector} and a container "
            f"{CONTAINER}: is the daemon installed? Beside HAMi's monitor its pods have HAMi's labels: give --selector"
        )
    if len(places := {daemon.namespace for _, daemon in nodes.values()}) > 1:
        raise Trouble(
            f"DaemonSets in several namespaces have the label {selector}: {', '.join(sorted(places))}. Name the "
            "daemons' namespace: --daemon-namespace NAMESPACE",
            EXIT_USAGE,
        )
    return {node: daemon for node, (_, daemon) in sorted(nodes.items())}


def _state_of(pod: dict[str, Any]) -> tuple[int, str]:
    """Return a rank, higher for a better pod to ask, and why it can't be asked."""
    statuses = pod["status"].get("containerStatuses", ())
    status: dict[str, Any] = next((status for status in statuses if status["name"] == CONTAINER), {})
    state = status.get("state", {})
    if "running" in state:
        return 1 + 2 * bool(status.get("ready")) + ("deletionTimestamp" not in pod["metadata"]), ""
    waiting = state.get("waiting") or state.get("terminated") or {}
    why = waiting.get("reason") or pod["status"].get("phase", "unknown")
    return 0, f"pod {pod['metadata']['name']} is {why}"


def pod_called(kubectl: Kubectl, text: str, namespace: str | None) -> Any:
    """Return the user's pod. Raises `Trouble` if it does not exist, or is on no node."""
    in_namespace, _, name = text.rpartition("/")
    namespace = in_namespace or namespace
    pod = kubectl.get("pod", name, *(("-n", namespace) if namespace else ()))
    if not pod["spec"].get("nodeName"):
        raise Trouble(f"pod {name} is on no node yet", EXIT_WRONG)
    return pod


def uid_of(pod: Any) -> str:
    """Return the UID that the node knows: a static pod's is its file's hash, not its mirror's."""
    mirrored = pod["metadata"].get("annotations", {}).get("kubernetes.io/config.mirror")
    return str(mirrored or pod["metadata"]["uid"])


def container_of(pod: Any, wanted: str | None) -> str:
    """Return the id of the chosen container, the default one, or the only one."""
    status = pod["status"]
    kinds = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
    listed = [entry for kind in kinds for entry in status.get(kind, ())]
    ids = {container["name"]: str(container.get("containerID", "")) for container in listed}
    default = pod["metadata"].get("annotations", {}).get("kubectl.kubernetes.io/default-container", "")
    name, pod_name = wanted or default or (min(ids) if len(ids) == 1 else ""), pod["metadata"]["name"]
    if name not in ids:
        raise Trouble(f"which container of {pod_name}? Give -c: {', '.join(ids) or 'none yet'}", EXIT_USAGE)
    if not ids[name]:
        raise Trouble(f"container {name} of {pod_name} has not started", EXIT_WRONG)
    return ids[name]


def _words(args: argparse.Namespace, pod: Any) -> list[str]:
    if args.command == "lookup":
        if pod is None or args.pid is None:
            raise Trouble("lookup takes POD and PID", EXIT_USAGE)
        return [container_of(pod, args.container), str(args.pid)]
    if args.command == "reverse":
        if not str(args.pid).isdecimal():
            raise Trouble("reverse takes HOST_PID and --node NODE, or POD and HOST_PID", EXIT_USAGE)
        return [str(args.pid)]
    if pod is not None and args.command in ("explain", "top"):
        return [f"{uid_of(pod)}/{args.container}" if args.container else uid_of(pod)]
    if args.command == "bundle":
        if sys.stdout.isatty():
            raise Trouble("bundle prints an archive: give it a file, as in > bundle.tar.gz", EXIT_USAGE)
        return ["-o", "-"]
    return []


def on_node(kubectl: Kubectl, args: argparse.Namespace) -> int:
    """Run the command on a pod's node, or on the named one; return its exit code."""
    if args.command == "reverse" and args.pid is None and (args.node or str(args.pod).isdecimal()):
        args.pod, args.pid = None, args.pod
    if not args.pod and not args.node:
        raise Trouble(f"{args.command} is about one node: give POD or --node NODE", EXIT_USAGE)
    pod = pod_called(kubectl, args.pod, args.namespace) if args.pod else None
    words = _words(args, pod)
    node = args.node or (pod["spec"]["nodeName"] if pod is not None else "")
    nodes = daemons(kubectl, args.selector, args.daemon_namespace)
    if node not in nodes:
        raise Trouble(f"no daemon runs on node {node}; there is one on: {', '.join(nodes)}")
    if nodes[node].why:
        raise Trouble(f"the daemon on node {node} cannot be asked: {nodes[node].why}")
    command = [args.command, *words, *(["--json"] if args.json else []), *args.rest]
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    done = subprocess.run(
        kubectl.exec(nodes[node], command, *(("-i", "-t") if terminal else ())),
        stdin=None if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # with a terminal, only kubectl writes to it
        check=False,
    )
    message = done.stderr.decode("utf-8", "replace")
    if why := _missing_right(message, nodes[node]):
        raise Trouble(why)
    sys.stderr.write(_printable(_ENDED.sub("", message)))
    return done.returncode if _ENDED.search(message) or done.returncode <= 0 else EXIT_CANNOT_KNOW


_HEAD = "NODE READY VERSION SOURCE GPUS CONTAINERS IDLE SLOTS REPAIRED UNRESOLVED TROUBLE".split()  # noqa: SIM905


def status(kubectl: Kubectl, args: argparse.Namespace) -> int:
    """Print a line for each node; a slow one delays no other."""
    by_node = daemons(kubectl, args.selector, args.daemon_namespace)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda daemon: kubectl.status(daemon, args.timeout), by_node.values()))
    if args.json:
        nodes = zip(by_node.values(), answers, strict=True)
        documents = [
            {"node": daemon.node, "pod": f"{daemon.namespace}/{daemon.pod}", "status": answer, "error": why}
            for daemon, (answer, why) in nodes
        ]
        print(json.dumps(documents, indent=2))
    else:
        rows = [
            [node, *map(_printable, _cells(*answer))] for node, answer in zip(by_node, answers, strict=True)
        ]
        widths = [max(map(len, cells)) for cells in zip(_HEAD, *rows, strict=True)]
        for row in (_HEAD, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    wrong = (
        answer is None
        or answer["source"]["not_ready"]
        or any(trouble["grave"] for trouble in answer.get("troubles", ()))
        for answer, _ in answers
    )
    return EXIT_WRONG if any(wrong) else 0


def _cells(answer: Any, why: str) -> list[str]:
    if answer is None:
        return ["?", *"-" * 8, why]
    source, totals, driver = (answer[key] for key in ("source", "totals", "driver"))
    ill = f" ({driver['gpus_unhealthy']} ill)" if driver["gpus_unhealthy"] else ""
    counts = (totals[key] for key in ("slots", "slots_repaired", "slots_unresolved"))
    idle = answer.get("idle_since")
    troubles = (f"{trouble['what']}: {trouble['why']}" for trouble in answer.get("troubles", ()))
    return [
        "no" if source["not_ready"] else "yes",
        answer["version"],
        source["name"],
        f"{driver['gpus']}{ill}",
        str(totals["containers"]),
        f"{(answer['at'] - idle) / 3600:.1f}h" if idle else "-",
        *map(str, counts),
        "; ".join(troubles) or "-",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl resolver",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    add("pod", nargs="?", metavar="POD", help="on the node of this pod")
    about = "for lookup: as the container sees it; for reverse: the host's"
    add("pid", nargs="?", type=int, metavar="PID", help=about)
    add("--node", help="on this node")
    add("-n", "--namespace", help="of POD")
    add("-c", "--container", help="of POD, for lookup, explain and top; default: its default or only one")
    add("--json", action="store_true", help="JSON")
    add("--timeout", type=float, default=15.0, metavar="SECONDS", help="of status, for each node (15)")
    add("--selector", default=SELECTOR, help=f"the labels of the daemons' pods (default {SELECTOR})")
    add("--daemon-namespace", metavar="NAMESPACE", help="of the daemons' pods, if several have such pods")
    for name in _KUBECTL:
        add(f"--{name}", help="kubectl's")
    add("--version", action="version", version=f"kubectl resolver {VERSION}", help="show its version")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 1 something is wrong, 2 usage, 4 kubectl or a daemon can't be asked."""
    words = sys.argv[1:] if argv is None else argv
    at = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:at])
    args.rest = words[at + 1 :]
    try:
        everywhere = args.command == "status" and not args.pod and not args.node
        return (status if everywhere else on_node)(Kubectl(args), args)
    except Trouble as trouble:
        print(f"kubectl resolver: {trouble}", file=sys.stderr)
        return trouble.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


if __name__ == "__main__":
    sys.exit(main())
