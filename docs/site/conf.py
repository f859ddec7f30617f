"""Sphinx settings for the pages as they are in the repository: `make docs` builds build/site.

The repository is the source directory, so that links work there and on the site. docs/README.md orders the sidebar:
each of its sections is a group, each link at the beginning of an item a page.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent.parent

project = "resolver"
author = "the authors of resolver"
project_copyright = author
release = version = runpy.run_path(str(ROOT / "resolver/base/version.py"))["VERSION"]

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "bpf/*.md", "docs/**.md", "deploy/**.md"]
exclude_patterns = [".*", "build", "dist", "resolver", "scripts", "shared", "tests"]
#: GitHub's own anchors, so that one link serves both.
myst_heading_anchors = 4
#: An <img> in a page is a local image, to be copied.
myst_enable_extensions = ["html_image"]
#: A page may begin where another one ends: README.md has no heading of the first level but one.
nitpicky = True

html_theme = "furo"
html_title = f"resolver {version}"
html_static_path = ["static"]
html_css_files = ["resolver.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"


def groups(text: str) -> dict[str, list[str]]:
    """Caption -> documents without their ending, as docs/README.md lists them."""
    documents = {}
    for section in text.split("\n## ")[1:]:
        caption, _, body = section.partition("\n")
        documents[caption] = [
            (ROOT / "docs" / target).resolve().relative_to(ROOT.resolve()).with_suffix("").as_posix()
            for target in re.findall(r"^- \[[^]]+\]\(([^)#:]+\.md)\)", body, re.MULTILINE)
        ]
    return documents


def _add_contents(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Add tables of contents; the pages in the repository contain no Sphinx markup."""
    if docname == root_doc:
        for caption, pages in groups((ROOT / "docs/README.md").read_text()).items():
            source[0] += _contents(*(f"/{page}" for page in pages), caption=caption)
    elif docname == "docs/README":
        source[0] = f"---\norphan: true\n---\n{source[0]}"  # the sidebar is the same


def _contents(*pages: str, caption: str = "") -> str:
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n\n```{toctree}", *options, "", *pages, "```\n"])


#: A picture's colours for dark paper: the whole block, and its content.
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.DOTALL)


def for_both(html: str, pictures: dict[str, str]) -> str:
    """Show each of these pictures in light and dark mode, by the reader's choice.

    A picture alone only knows the system's preference. ``pictures``: file name -> that of the dark one.
    """

    def twice(found: re.Match[str]) -> str:
        tag, name = found[0], found[1]
        if name not in pictures:
            return tag
        light, dark = (tag.replace("<img ", f'<img class="only-{theme}" ', 1) for theme in ("light", "dark"))
        return light + dark.replace(name, pictures[name])

    return re.sub(r'<img [^>]*?src="[^"]*?([^"/]+\.svg)"[^>]*>', twice, html)


def _show_pictures_for_both(place: Path) -> None:
    pictures = {}
    for picture in (place / "_images").glob("*.svg"):
        text = picture.read_text()
        if _DARK.search(text):
            pictures[picture.name] = f"{picture.stem}-dark.svg"
            picture.with_name(pictures[picture.name]).write_text(_DARK.sub(r"\1", text))
            picture.write_text(_DARK.sub("", text))
    for page in place.rglob("*.html"):
        page.write_text(for_both(page.read_text(), pictures))


#: Pages of earlier releases, which alerts and links may still name -> where their text is now.
_RUNBOOKS = (
    "Absent Conflicts DirectoryMissing Down GpuUnhealthy InternalErrors NotReady NvmlFailing Quarantine"
)
_MOVED = {
    "decisions": "../CONTRIBUTING.html#decisions",
    "docker": "node.html#bare-docker-and-podman",
    "doctor": "troubleshooting.html#doctor",
    "drivers": "compatibility.html#drivers",
    "glossary": "../CONTRIBUTING.html#glossary",
    "gpus": "devices.html",
    "helm": "kubernetes.html#helm",
    "image": "kubernetes.html#the-image",
    "install": "kubernetes.html",
    "kernels": "compatibility.html#kernels",
    "limits": "compatibility.html",
    "log-events": "monitoring.html#log-events",
    "placements": "schedulers.html#where-the-files-are",
    "runtimes": "compatibility.html#engines",
    "scaling": "performance.html#scaling",
    "sources": "how-it-works.html#where-pids-come-from",
    "stability": "../CONTRIBUTING.html#stability",
    "systemd": "node.html",
    "tour": "../CONTRIBUTING.html#a-tour",
    "why-zero": "walk-through.html#why-it-is-0",
} | {
    f"runbooks/Resolver{name}": f"../monitoring.html#resolver{name.lower()}"
    for name in (*_RUNBOOKS.split(), "Restarts", "SlotsStuck", "SlotsUnresolved", "SourceDegraded")
}


def _keep_old_links(docs: Path) -> None:
    """Write a page at each address of a page that has moved, which leads to its text."""
    for old, new in _MOVED.items():
        page = docs / f"{old}.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text(
            f'<!doctype html><title>moved</title><meta http-equiv="refresh" content="0; url={new}">'
            f'<a href="{new}">{new}</a>\n'
        )


def _finish(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        _show_pictures_for_both(Path(app.outdir))
        _keep_old_links(Path(app.outdir) / "docs")
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Answer Sphinx's call."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _finish)


def main() -> int:
    """Build the site. Every warning is an error; all of them are printed."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "1"]
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"
    command += ["-c", str(Path(__file__).parent), "-d", f"{place}.cache", str(ROOT), str(place)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
