"""A stand-in for `kubectl` at its wire: options, JSON of `get pods`, `exec`, exit codes and error texts.

Its cluster is a JSON file that KUBECTL_CLUSTER names: ``pods`` as the API server has them, and for each daemon's pod in
``exec`` what stands behind it: the ``socket`` of a daemon, ``error`` (what kubectl says when it does not get there),
or ``hangs``. `resolver` itself is the real one. As strict as the original: an option that it does not have is refused.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"error: {message}")


def parser() -> argparse.ArgumentParser:
    root = Parser(prog="kubectl", allow_abbrev=False)
    for name in ("as", "cluster", "context", "kubeconfig"):
        root.add_argument(f"--{name}")
    verbs = root.add_subparsers(dest="verb", required=True)
    for verb in ("get", "exec"):
        added = verbs.add_parser(verb, allow_abbrev=False)
        added.add_argument("names", nargs="+")
        added.add_argument("-n", "--namespace")
        if verb == "get":
            added.add_argument("-l", "--selector", default="")
            added.add_argument("-o", "--output")
            added.add_argument("-A", "--all-namespaces", action="store_true")
        else:
            added.add_argument("-c", "--container")
            added.add_argument("-i", "--stdin", action="store_true")
            added.add_argument("-t", "--tty", action="store_true")
    return root


def fail(text: str, code: int = 1) -> NoReturn:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def selected(pod: dict[str, Any], selector: str) -> bool:
    """Tell if a pod has all labels of a selector (`name=value`, separated by commas)."""
    labels = pod["metadata"].get("labels", {})
    wanted = [part.replace("==", "=").split("=", 1) for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, value in wanted)


def authorize(cluster: dict[str, Any], verb: str, resource: str, namespace: str = "") -> None:
    """Refuse as the API server's RBAC does; ``rules`` are (namespace, resource, verb), empty for the cluster."""
    rules = [tuple(rule) for rule in cluster.get("rules", ())]
    if "rules" in cluster and not {(place, resource, verb) for place in ("", namespace)} & {*rules}:
        scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        fail(
            f'Error from server (Forbidden): {resource} is forbidden: User "eve" cannot {verb} resource "{resource}" '
            f'in API group "" {scope}'
        )


def get(cluster: dict[str, Any], options: argparse.Namespace) -> None:
    names, everywhere = options.names, options.all_namespaces
    if names[0] not in ("pod", "pods", "po") or options.output != "json":
        fail(f'error: the server doesn\'t have a resource type "{names[0]}"')
    namespace = options.namespace or cluster.get("namespace", "default")
    authorize(cluster, "list" if len(names) == 1 else "get", "pods", "" if everywhere else namespace)
    pods = [
        pod
        for pod in cluster["pods"]
        if (everywhere or pod["metadata"]["namespace"] == namespace) and selected(pod, options.selector)
    ]
    if len(names) == 1:
        json.dump({"apiVersion": "v1", "kind": "List", "items": pods}, sys.stdout)
        return
    found = [pod for pod in pods if pod["metadata"]["name"] == names[1]]
    if not found:
        fail(f'Error from server (NotFound): pods "{names[1]}" not found')
    json.dump(found[0], sys.stdout)


def execute(cluster: dict[str, Any], options: argparse.Namespace, command: list[str]) -> None:
    """Run `kubectl exec`, which ends with the program's exit code and prints that code to standard error."""
    (name,), namespace = options.names, options.namespace or "default"
    place = f"{namespace}/{name}"
    authorize(cluster, "get", "pods", namespace)
    authorize(cluster, "create", "pods/exec", namespace)
    pods = {f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": pod for pod in cluster["pods"]}
    if place not in pods:
        fail(f'Error from server (NotFound): pods "{name}" not found')
    containers = [container["name"] for container in pods[place]["spec"]["containers"]]
    if options.container not in containers:
        fail(f"Error from server (BadRequest): container {options.container} is not valid for pod {name}")
    behind = cluster["exec"][place]
    if "error" in behind:
        fail(behind["error"])
    if behind.get("hangs"):
        time.sleep(600)
    assert command[0] == "resolver"
    if options.tty and not sys.stdin.isatty():
        sys.stderr.write("Unable to use a TTY - input is not a terminal or the right kind of file\n")
    done = subprocess.run(
        [sys.executable, "-m", "resolver", *command[1:]],
        env=os.environ | {"RESOLVER_SOCKET": behind["socket"]},
        stdin=None if options.stdin else subprocess.DEVNULL,
        stderr=sys.stdout if options.tty else None,  # a terminal has one stream
        check=False,
    )
    if done.returncode:
        fail(f"command terminated with exit code {done.returncode}", done.returncode)


def main() -> None:
    with open(os.environ["KUBECTL_CLUSTER"]) as file:
        cluster = json.load(file)
    if "down" in cluster:
        for _ in range(5):  # before it gives up
            why = 'Unhandled Error" err="couldn\'t get current server API group list: connection refused"'
            print(f'E1122 15:07:15.574717   14903 memcache.go:265] "{why}', file=sys.stderr)
        fail(
            "The connection to the server 127.0.0.1:6443 was refused - did you specify the right host or port?"
        )
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser().parse_args(sys.argv[1:at])
    if options.verb == "get":
        get(cluster, options)
    else:
        execute(cluster, options, sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
