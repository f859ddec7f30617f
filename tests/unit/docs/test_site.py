"""`make docs`: the site is built without a warning, is complete, and loads nothing from other sites."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.fakes.documents import documents
from tests.programs import completed

#: Sphinx is slow: `make docs` builds the site and reports its warnings.
pytestmark = pytest.mark.long

#: Pages in frames of many widths; the title lists elements wider than their frame.
SCROLLED = """<!DOCTYPE html><title>measuring</title><body><script>
const widths = WIDTHS, pages = PAGES, wide = [];
const frame = document.body.appendChild(document.createElement("iframe"));
frame.style = "height: 800px; border: 0; position: absolute; left: 0";
(async () => {
    for (const page of pages) {
        await new Promise((done) => { frame.onload = done; frame.src = page; });
        const seen = frame.contentDocument.documentElement;
        for (const spacing of ["normal", "0.1em"])
        for (const width of widths) {
            // a reader's font may be wider than this machine's
            seen.style.letterSpacing = spacing;
            frame.style.width = width + "px";
            // hidden parts count, too: Furo cuts them off
            const body = frame.contentDocument.body;
            if (Math.max(seen.scrollWidth, body.scrollWidth) > seen.clientWidth)
                wide.push(page + " at " + width + ": " + Math.max(seen.scrollWidth, body.scrollWidth));
        }
    }
    document.title = "wider: " + JSON.stringify(wide);
})();
</script>"""
WIDTHS = (
    320, 360, 414, 600, 736, 768, 800, 900, 1000, 1010, 1072, 1100, 1200, 1312, 1320, 1440, 1552, 1920, 2560,
)  # fmt: skip

#: Elements that a browser fetches, and their address attribute.
FETCHED = dict.fromkeys(("script", "img", "iframe", "source", "embed"), "src")
FETCHED |= {"link": "href", "object": "data"}


class Page(HTMLParser):
    """One page: its ids, links, and loaded files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        if tag in FETCHED and found.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            self.fetched.add(found.get(FETCHED[tag], ""))


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs") / "site"
    command: list[str | Path] = [sys.executable, root / "docs/site/conf.py", place]
    done = completed(*command)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_site_has_every_page(site: Path, root: Path) -> None:
    for document in documents(root):
        if "tests" not in document.relative_to(root).parts:
            assert (site / document.relative_to(root).with_suffix(".html")).exists()
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()


def test_site_links_and_anchors_exist(pages: dict[Path, Page]) -> None:
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


def test_site_loads_nothing_from_other_sites(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for what in page.fetched:
            address = urlsplit(what)
            assert not (address.scheme or address.netloc) or address.scheme == "data", f"{path.name}: {what}"
            if address.path and address.scheme != "data":
                assert (path.parent / unquote(address.path)).exists(), f"{path.name}: {what}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_no_page_scrolls_sideways_from_320_to_2560_pixels(site: Path, tmp_path: Path) -> None:
    pages = [
        str(path.relative_to(site))
        for path in site.rglob("*.html")
        if 'http-equiv="refresh"' not in path.read_text()
    ]
    script = SCROLLED.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(pages), 1)
    (site / "scrolled.html").write_text(script)
    browser = ["chromium-headless-shell", "--headless", "--no-sandbox", "--disable-gpu"]
    browser += ["--disable-dev-shm-usage", "--allow-file-access-from-files"]
    browser += [f"--user-data-dir={tmp_path}", "--window-size=2600,900"]
    done = completed(*browser, "--virtual-time-budget=120000", "--dump-dom", f"file://{site}/scrolled.html")
    found = re.search(r"<title>wider: (.*?)</title>", done.stdout)
    assert found, done.stderr[-2000:]
    assert json.loads(found[1].replace("&amp;", "&")) == []
