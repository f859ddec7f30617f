"""The offsets of `tests/fixtures/regions/structs.c` as a C compiler gives them: the tests' own table of layouts.

Kept apart from `resolver.hami.layout` on purpose: a wrong offset there must not be wrong here, too.
``python -m tests.fakes.layouts`` writes the table, so that a test that reads it needs no compiler.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from tests.fakes.cachefiles import NAMES, RECORDED
from tests.programs import completed

TABLE = RECORDED / "layouts.json"


def compiled(name: str) -> dict[str, int]:
    """Return the offsets and sizes of a layout's fields, by the compiler."""
    define = name.upper().replace("-", "_").replace(".", "_")
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "structs"
        subprocess.run(["gcc", f"-D{define}", "-o", program, RECORDED / "structs.c"], check=True)
        lines = completed(program, check=True).stdout.splitlines()
    return {field: int(offset) for field, offset in map(str.split, lines)}


if __name__ == "__main__":
    TABLE.write_text(json.dumps({name: compiled(name) for name in NAMES}, indent=1) + "\n")
