"""Daemons with few rights or with patched code, and the main job that they must still do."""

import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from resolver.linux.capabilities import NUMBERS
from tests.fakes.daemon import Daemon
from tests.fakes.node import Node


class Rights(NamedTuple):
    effective: frozenset[str]
    permitted: frozenset[str]
    bounding: frozenset[str]
    inheritable: frozenset[str]
    ambient: frozenset[str]
    no_new_privs: bool
    filtered: bool  # by seccomp


def rights(host_pid: int) -> Rights:
    """Return a process's rights from /proc; a capability that the table lacks is named by its number."""
    fields = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{host_pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    known = {number: name for name, number in NUMBERS.items()}

    def names(field: str) -> frozenset[str]:
        mask = int(fields[field], 16)
        return frozenset(known.get(bit, str(bit)) for bit in range(64) if mask >> bit & 1)

    effective, permitted, bounding, inheritable, ambient = map(
        names, ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")
    )
    promised, filtered = fields["NoNewPrivs"] == "1", fields["Seccomp"] == "2"
    return Rights(effective, permitted, bounding, inheritable, ambient, promised, filtered)


def with_nothing_but(names: frozenset[str]) -> tuple[str, ...]:
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in sorted(names))])
    return ("setpriv", "--inh-caps", "-all", "--bounding-set", kept)


def without(*names: str) -> tuple[str, ...]:
    lost = ",".join(f"-{name.lower()}" for name in names)
    return ("setpriv", "--inh-caps", lost, "--bounding-set", lost)


UNPRIVILEGED = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


def works(node: Node, daemon: Daemon, source: str) -> None:
    """Check the main job: repairs in every kind of PID namespace, a load, and a zeroed dead slot."""
    daemon.wait_for("source", source=source)  # on a busy machine the daemon may climb to it later
    container, free = node.container(), node.container(name="free", watcher=False)
    nesting, host = node.container(name="nesting"), node.container(name="host", pid_namespace="host")
    sharing = node.container(container.pod_uid, "sharing", pid_namespace=container)
    tenants = [container.tenant(load=5, guess="wrong"), nesting.tenant(guess="none", nested=True)]
    tenants += [
        each.tenant(guess=guess) for each, guess in ((nesting, "self"), (sharing, "self"), (host, "none"))
    ]
    lone = free.tenant(load=40, guess="none")
    for tenant in (*tenants, lone):
        tenant.until_repaired()
    lone.until_load(40)
    lone.kill()
    lone.until_load(0)
    assert daemon.said("write_failed") == []


def patched(code: str, *arguments: str) -> tuple[str, ...]:
    """Return a wrapper that runs this code before the daemon; ``sys.argv[1:]`` has the arguments."""
    program = """
        import sys
        CODE
        from resolver.cli import main
        sys.argv = ["resolver", *sys.argv[sys.argv.index("resolver") + 1 :]]
        sys.exit(main())
    """
    text = textwrap.dedent(program).replace("CODE", textwrap.dedent(code))
    return (sys.executable, "-c", text, *arguments)


def held(go: Path) -> tuple[str, ...]:
    """Return a wrapper whose BPF loader waits until this file exists, as a compiler on a busy node may."""
    return patched(
        """
        import os, time
        from resolver.pids import bpf_load
        ask, go = bpf_load.ask_once, sys.argv[1]
        def slowly(*arguments, **how):
            while not os.path.exists(go):
                time.sleep(0.02)
            return ask(*arguments, **how)
        bpf_load.ask_once = slowly
        """,
        str(go),
    )


#: On SIGUSR1, replaces each descriptor of a map with another file's, as if the kernel had removed the map.
FRAGILE = patched("""
    import gc, os, signal
    from resolver.pids import ladder
    ladder.FIRST_CLIMB = 0.2
    def break_down(*_):
        nothing = os.open("/dev/null", os.O_RDONLY)
        for each in gc.get_objects():
            if type(each).__name__ == "KernelMap":
                for kernel_map in (each.processes, each.namespaces, each._counters):
                    os.dup2(nothing, kernel_map.fd)
        os.close(nothing)
    signal.signal(signal.SIGUSR1, break_down)
""")
NO_BTF = patched("from resolver.pids import bpf_load; bpf_load.BTF = '/sys/kernel/btf/none'")


def with_python(python: object) -> tuple[str, ...]:
    return patched(f"from resolver.pids import bpf_load; bpf_load.PYTHON = {str(python)!r}")


def mounted(commands: str) -> tuple[str, ...]:
    """Return a wrapper that runs a command in a new mount namespace after these shell commands."""
    return ("unshare", "--mount", "sh", "-ec", f'{commands}\nexec "$@"', "sh")
