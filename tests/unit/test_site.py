"""`make docs`: the site is built without a warning, is complete, and asks nobody else for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

import pytest

from tests.documents import documents

#: Sphinx takes its time: `make docs` builds the site, and says what it stumbles over.
pytestmark = pytest.mark.long

#: What a browser fetches by itself, and where the address stands.
FETCHED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "embed": "src",
}


class Page(HTMLParser):
    """One page: ids, links, and what is fetched with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.pictures: dict[str, str] = {}  # address -> class
        self.untold: set[str] = set()  # pictures without words for who can't see them
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "img" and len(found.get("alt", "")) < 15:
            self.untold.add(found.get("src", ""))
        if tag == "img":
            self.pictures[found.get("src", "")] = found.get("class", "")
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        if tag in FETCHED and found.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            self.fetched.add(found.get(FETCHED[tag], ""))


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs") / "site"
    command: list[str | Path] = [sys.executable, root / "docs/site/conf.py", place]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_on_it(site: Path, root: Path) -> None:
    for document in documents(root):
        if "tests" not in document.relative_to(root).parts:
            assert (site / document.relative_to(root).with_suffix(".html")).exists()
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()


def test_every_link_and_its_anchor_are_there(pages: dict[Path, Page]) -> None:
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme:
                assert address.scheme in ("http", "https", "mailto"), f"{path.name}: {link}"
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert target.exists(), f"{path.name} links to {link}"
            if address.fragment and target in pages:
                assert unquote(address.fragment) in pages[target].ids, f"{path.name} links to {link}"
                followed += 1
    assert followed > 100


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for what in page.fetched:
            address = urlsplit(what)
            assert not (address.scheme or address.netloc) or address.scheme == "data", f"{path.name}: {what}"
            if address.path and address.scheme != "data":
                assert (path.parent / unquote(address.path)).exists(), f"{path.name}: {what}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_pictures_are_dark_where_the_page_is(root: Path, site: Path, pages: dict[Path, Page]) -> None:
    """By the reader's choice, not by what the system prefers."""
    both = [each for each in (root / "docs").glob("*.svg") if "prefers-color-scheme" in each.read_text()]
    assert len(both) > 5
    for picture in both:
        light, dark = (site / "_images" / f"{picture.stem}{ending}.svg" for ending in ("", "-dark"))
        for drawn in (light, dark):
            ET.parse(drawn)  # noqa: S314  # our own
            assert "prefers-color-scheme" not in drawn.read_text()
        assert light.read_text() != dark.read_text()
        assert re.findall(r"\.paper *\{ fill: #(\w)", dark.read_text())[-1] in "01", "dark paper, and it wins"
    for path, page in pages.items():
        names = [Path(what).name for what in page.pictures]
        for picture in both:
            shown = [page.pictures[what] for what in page.pictures if Path(what).name == picture.name]
            if picture.name in names:
                assert shown == ["only-light"], f"{path.name}: {picture.name}"
                assert f"{picture.stem}-dark.svg" in names


def test_pictures_are_told_in_words_and_their_own(root: Path, pages: dict[Path, Page]) -> None:
    pictures = list((root / "docs").glob("*.svg"))
    assert len(pictures) > 5
    for picture in pictures:
        ET.parse(picture)  # noqa: S314  # our own
        assert not re.search(r"<script|<image|href=\"https?:|url\(http", picture.read_text()), picture.name
    assert {what for page in pages.values() for what in page.untold} == set()
    shown = {Path(what).name for page in pages.values() for what in page.fetched}
    assert {picture.name for picture in pictures} <= shown
