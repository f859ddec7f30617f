"""Checks that start each source of PIDs, look up a new process with it, and close it."""

import contextlib
import time

from resolver.base.errors import ResolverError
from resolver.base.source_records import SOURCE_RECORDS, SourceFailure, SourceName
from resolver.base.text import several
from resolver.doctor.findings import Finding, failed, ok, unknown, warning
from resolver.doctor.node import Node

_LAST_LINES = 30


def bpf(node: Node) -> Finding:
    """Check that the probes can be loaded and the kernel's map finds a new process."""
    return _tried(SourceName.BPF, node)


def netlink(node: Node) -> Finding:
    """Check that the kernel's process events come, by the proc connector."""
    return _tried(SourceName.NETLINK, node)


def scan(node: Node) -> Finding:
    """Check that a scan of ``/proc`` finds a new process."""
    return _tried(SourceName.SCAN, node)


def _tried(name: str, node: Node) -> Finding:
    """Try a source once: others ask whether the daemon can fall back to it."""
    if name not in node.tried:
        node.tried[name] = _try(SourceName(name), node)
    return node.tried[name]


def _try(name: SourceName, node: Node) -> Finding:
    import asyncio

    from resolver.pids.ladder import find_canary, open_source

    if name not in node.sources and name != SourceName.SCAN:
        return ok(f"not tried: the settings ask for {node.sources[0]} only")
    began = time.monotonic()
    try:
        source = open_source(name, node.procfs, node.settings.map_size)
    except (ResolverError, OSError) as error:
        failure = SourceFailure(getattr(error, "cause", SOURCE_RECORDS[name].failure))
        finding = _refused(name, node, "it cannot be started", getattr(error, "why", str(error)), failure)
        # The last lines of the verifier's output have the reason.
        detail = getattr(error, "detail", "").splitlines()[-_LAST_LINES:]
        return finding._replace(detail="\n".join(detail))
    with contextlib.closing(source):
        canary = asyncio.run(find_canary(source))
        seconds, processes = time.monotonic() - began, several(len(source), "process", "processes")
        if canary.trouble:
            failure = SOURCE_RECORDS[name].failure
            return _refused(name, node, "it does not find a new process", canary.trouble, failure)
        if canary.unmade:
            return unknown(
                f"it runs, but no canary could be made to test it: {canary.unmade}",
                "the test looks up a new process, and none could be started",
                "raise the limit that the error names, or end processes of this node; then try again",
            )
        shortage = source.shortage() or source.trouble()
    node.works.add(name)
    if shortage:
        return warning(f"it works, {processes}", shortage, "set map_size higher")
    return ok(f"found a process that was just made, among {processes}, in {seconds:.1f} s")


def _refused(name: SourceName, node: Node, summary: str, why: str, failure: SourceFailure) -> Finding:
    _, fix = failure.for_terminal()
    below = node.sources[node.sources.index(name) + 1 :] if name in node.sources else ()
    in_use = node.status.source.name if node.status else name
    if in_use != name:
        return warning(f"{summary}; the daemon uses {in_use}", why, fix)
    for other in below:
        _tried(other, node)
        if other in node.works:
            return warning(f"{summary}; the daemon falls back to {other}", why, fix)
    return failed(summary, why, fix if len(node.sources) > 1 else f"{fix}, or set source = auto")
