"""Finds the host PID behind every process in a HAMi container, and keeps HAMi's shared regions truthful.

Nothing is imported here: every command pays for this module.
"""

__version__: str


def __getattr__(name: str) -> str:
    """Find the version on first use. Raises AttributeError for other names."""
    if name != "__version__":
        raise AttributeError(f"module 'resolver' has no attribute {name!r}")
    from resolver.base.version import find

    globals()[name] = found = find()
    return found
