"""How Sphinx makes a site of the pages, as they are in the repository: `make docs` builds it into build/site.

The repository is the source directory, so that a link that works there works on the site. What stands in the sidebar,
and in which order, docs/README.md says: each of its sections is a group, each link at the beginning of an item a page.
"""

from __future__ import annotations

import re
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
(version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "resolver/__init__.py").read_text())
release = version

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "bpf/*.md", "docs/**.md", "deploy/**.md"]
exclude_patterns = [".*", "build", "dist", "resolver", "scripts", "shared", "tests"]
#: GitHub's own anchors, so that one link serves both.
myst_heading_anchors = 4
#: <img> in a page is an image of ours, to be copied along.
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
    found = {}
    for section in text.split("\n## ")[1:]:
        caption, _, body = section.partition("\n")
        found[caption] = [
            (ROOT / "docs" / target).resolve().relative_to(ROOT.resolve()).with_suffix("").as_posix()
            for target in re.findall(r"^- \[[^]]+\]\(([^)#:]+\.md)\)", body, re.MULTILINE)
        ]
    return found


def _add_contents(_app: Sphinx, docname: str, source: list[str]) -> None:
    """The pages have no word of Sphinx's in the repository; they get their tables of contents here."""
    if docname == root_doc:
        for caption, pages in groups((ROOT / "docs/README.md").read_text()).items():
            source[0] += _contents(*(f"/{page}" for page in pages), caption=caption)
    elif docname == "docs/monitoring":
        source[0] += _contents("/docs/runbooks/*")
    elif docname == "docs/README":
        source[0] = f"---\norphan: true\n---\n{source[0]}"  # the sidebar is the same


def _contents(*pages: str, caption: str = "") -> str:
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n\n```{toctree}", *options, "", *pages, "```\n"])


#: A picture's colours for dark paper: the whole block, and what is in it.
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.DOTALL)


def for_both(html: str, pictures: dict[str, str]) -> str:
    """A page that shows each of these pictures as the reader's choice of light and dark wants it.

    A picture on its own only knows what the system prefers. ``pictures``: file name -> that of the dark one.
    """

    def twice(found: re.Match[str]) -> str:
        tag, name = found[0], found[1]
        if name not in pictures:
            return tag
        light, dark = (tag.replace("<img ", f'<img class="only-{each}" ', 1) for each in ("light", "dark"))
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


def _finish(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        _show_pictures_for_both(Path(app.outdir))
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _finish)


def main() -> int:
    """Builds it; every warning is an error, and all of them are shown."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "1"]
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"
    command += ["-c", str(Path(__file__).parent), "-d", f"{place}.cache", str(ROOT), str(place)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
