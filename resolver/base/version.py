"""The version of this program, which stands here only: `make tables` copies it into manifests, chart and documents."""

from __future__ import annotations

VERSION = "0.2.0"

if __name__ == "__main__":
    print(VERSION)  # noqa: T201
