"""Mounts that a tenant makes in its directory are refused: in a mount namespace of its own."""

import json
import subprocess
import sys
from pathlib import Path


def test_mounts_below_a_containers_directory_are_refused(tmp_path: Path) -> None:
    """Even of the same file system, where device numbers tell nothing."""
    code = """
import json, subprocess, sys
from pathlib import Path
from resolver.hami.directory_finder import DirectoryFinder
from resolver.linux.procfs import Procfs
from tests.fakes.cachefiles import container, recorded, write
here = Path(sys.argv[1])
other = write(here / "elsewhere" / "x.cache", recorded("v1.2"))
good = container(here / "c", "good")
place = container(here / "c", "file")
(here / "c" / "uid_dir").mkdir()
subprocess.run(["mount", "--bind", other, place], check=True)
subprocess.run(["mount", "--bind", other.parent, here / "c" / "uid_dir"], check=True)
find = DirectoryFinder([str(here / "c")], Procfs())
find.refresh(full=True)
assert find.regions.keys() == {str(good)}, find.regions
print(json.dumps({path.rsplit("/", 1)[1]: reason for path, reason in find.rejected.items()}))
"""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"6f1e2d3c.cache": "other_device", "uid_dir": "other_device"}
