"""A stand-in for `kubectl` at its wire: options, JSON of `get pods`, `exec`, exit codes and error texts.

Its cluster is a JSON file that KUBECTL_CLUSTER names: ``pods`` as the API server has them, and for each daemon's pod in
``exec`` what stands behind it: the ``socket`` of a daemon, ``error`` (what kubectl says when it does not get there),
or ``hangs``. `resolver` itself is the real one. As strict as the original: an option that it does not have is refused.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any, NoReturn

#: Options that take a value, short and long.
VALUES = {"-n": "namespace", "--namespace": "namespace", "-l": "selector", "--selector": "selector",
          "-o": "output", "--output": "output", "-c": "container", "--container": "container",
          "--as": "as", "--cluster": "cluster", "--context": "context", "--kubeconfig": "kubeconfig"}  # fmt: skip
FLAGS = {
    "-A": "all",
    "--all-namespaces": "all",
    "-i": "stdin",
    "--stdin": "stdin",
    "-t": "tty",
    "--tty": "tty",
}
ANY = {"as", "cluster", "context", "kubeconfig"}
ALLOWED = {
    "get": {"namespace", "selector", "output", "all", *ANY},
    "exec": {"namespace", "container", "stdin", "tty", *ANY},
}


def fail(text: str, code: int = 1) -> NoReturn:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def parsed(words: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    options: dict[str, str] = {}
    names: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            return options, names, words
        name, equals, value = word.partition("=")
        if name in VALUES:
            options[VALUES[name]] = value if equals else words.pop(0)
        elif word in FLAGS:
            options[FLAGS[word]] = "true"
        elif word.startswith("-"):
            fail(f"error: unknown {'flag' if word.startswith('--') else 'shorthand flag'}: {word}")
        else:
            names.append(word)
    return options, names, []


def selected(pod: dict[str, Any], selector: str) -> bool:
    """By equality, as `name=value` with commas."""
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


def get(cluster: dict[str, Any], options: dict[str, str], names: list[str]) -> None:
    if names[0] not in ("pod", "pods", "po") or options.get("output") != "json":
        fail(f'error: the server doesn\'t have a resource type "{names[0]}"')
    namespace = options.get("namespace", cluster.get("namespace", "default"))
    authorize(cluster, "list" if len(names) == 1 else "get", "pods", "" if "all" in options else namespace)
    pods = [
        pod
        for pod in cluster["pods"]
        if ("all" in options or pod["metadata"]["namespace"] == namespace)
        and selected(pod, options.get("selector", ""))
    ]
    if len(names) == 1:
        json.dump({"apiVersion": "v1", "kind": "List", "items": pods}, sys.stdout)
        return
    found = [pod for pod in pods if pod["metadata"]["name"] == names[1]]
    if not found:
        fail(f'Error from server (NotFound): pods "{names[1]}" not found')
    json.dump(found[0], sys.stdout)


def execute(cluster: dict[str, Any], options: dict[str, str], names: list[str], command: list[str]) -> None:
    """`kubectl exec`: the program's exit code is kubectl's, which says so on standard error."""
    place = f"{options.get('namespace', 'default')}/{names[0]}"
    authorize(cluster, "get", "pods", options.get("namespace", "default"))
    authorize(cluster, "create", "pods/exec", options.get("namespace", "default"))
    pods = {f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": pod for pod in cluster["pods"]}
    if place not in pods:
        fail(f'Error from server (NotFound): pods "{names[0]}" not found')
    containers = [container["name"] for container in pods[place]["spec"]["containers"]]
    if options.get("container") not in containers:
        fail(
            f"Error from server (BadRequest): container {options.get('container')} is not valid for pod {names[0]}"
        )
    behind = cluster["exec"][place]
    if "error" in behind:
        fail(behind["error"])
    if behind.get("hangs"):
        time.sleep(600)
    assert command[0] == "resolver"
    terminal = "tty" in options
    if terminal and not sys.stdin.isatty():
        sys.stderr.write("Unable to use a TTY - input is not a terminal or the right kind of file\n")
    done = subprocess.run(
        [sys.executable, "-m", "resolver", *command[1:]],
        env=os.environ | {"RESOLVER_SOCKET": behind["socket"]},
        stdin=None if "stdin" in options else subprocess.DEVNULL,
        stderr=sys.stdout if terminal else None,  # a terminal has one stream
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
    options, names, command = parsed(sys.argv[1:])
    verb = names.pop(0)
    if verb not in ALLOWED:
        fail(f'error: unknown command "{verb}" for "kubectl"')
    if unknown := options.keys() - ALLOWED[verb]:
        fail(f"error: unknown flag: --{min(unknown)}")
    if verb == "get":
        get(cluster, options, names)
    else:
        execute(cluster, options, names, command)


if __name__ == "__main__":
    main()
