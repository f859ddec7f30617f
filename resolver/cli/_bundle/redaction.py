"""Replaces names by pseudonyms, the same in every part of a bundle; rather too often than too rarely."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UUID = r"[0-9a-fA-F]{8}[-_](?:[0-9a-fA-F]{4}[-_]){3}[0-9a-fA-F]{12}"
#: Kind of a value, by the field's name.
_FIELDS = {
    "namespace": "namespace",
    "pod": "pod",
    "container_name": "container",
    "user": "user",
    "comm": "command",
    "cmdline": "command",
    "command_line": "command",
}
#: Short ids are the beginning of whole ones.
_SHORT = 12
#: Only the whole value of their field: within sentences they are anything's name.
_WHOLE_ONLY = frozenset(("command",))
#: Labels of metrics, by the same measure.
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: JSON that was cut off is read as text.
_CUT_OFF = re.compile(rf'"({"|".join(_FIELDS)})": ?"([^"\\]+)"')
_PATTERNS = (
    ("uuid", re.compile(_UUID)),
    ("container-id", re.compile(r"(?<![0-9a-fA-F])[0-9a-f]{64}(?![0-9a-fA-F])")),
)
#: Parts of paths: HAMi's directories, kubelet's logs, homes.
_PATHS = (
    ("container", re.compile(rf"{_UUID}_([a-z0-9][a-z0-9.-]*)")),
    ("namespace", re.compile(rf"([a-z0-9.-]+)_[a-z0-9.-]+_{_UUID}")),
    ("pod", re.compile(rf"[a-z0-9.-]_([a-z0-9.-]+)_{_UUID}")),
    ("user", re.compile(r"/home/([^/\s\"']+)")),
)
_PSEUDONYM = r"([a-z-]+-\d+)"
#: Python says ``3.11.2 (main, Apr 28 2025, ...)`` of its build, and many a container is called ``main``.
_NO_BUILD = r"(?!, [A-Z][a-z]{2} +\d)"


class Redactor:
    """Learns names from every part first, then replaces them."""

    def __init__(self, hostnames: Iterable[str] = ()) -> None:
        self._pseudonyms: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None
        for name in hostnames:
            self._learn("host", name)

    def learn(self, text: str) -> None:
        """Take in the names of one part."""
        documents = list(_documents(text))
        for value in documents:
            self._walk(value)
        for field, name in () if documents else _CUT_OFF.findall(text):
            self._learn(_FIELDS[field], name)
        for label, value in _LABEL.findall(text):
            if label in ("namespace", "pod", "container", "container_name"):
                self._learn(_FIELDS.get(label, "container"), value)
        for kind, pattern in _PATHS:
            for name in pattern.findall(text):
                self._learn(kind, name)
        for kind, pattern in _PATTERNS:
            for name in pattern.findall(text):
                pseudonym = self._pseudonym(kind, name)
                if kind == "container-id":
                    self._pseudonyms.setdefault(name[:_SHORT], pseudonym)

    def _walk(self, value: object, key: str = "") -> None:
        if isinstance(value, dict):
            about_container = bool({"pod", "pod_uid", "container_name", "container_id"} & value.keys())
            for name, below in value.items():
                masked = name in _FIELDS and (name != "namespace" or about_container)
                self._walk(below, name if masked else "")
        elif isinstance(value, list):
            for below in value:
                self._walk(below, key)
        elif isinstance(value, str) and key:
            self._learn(_FIELDS[key], value)

    def _learn(self, kind: str, name: str) -> None:
        pseudonyms = self._whole if kind in _WHOLE_ONLY else self._pseudonyms
        if name and name not in pseudonyms:
            pseudonyms[name] = self._next(kind)
            self._pattern = None

    def _next(self, kind: str) -> str:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}-{self._numbers[kind]}"

    def redact(self, text: str) -> str:
        """Return the text without names. JSON stays JSON, and its keys stay."""
        documents = list(_documents(text))
        if documents:
            lines = text.lstrip().startswith("{") and len(documents) > 1
            shown = [
                json.dumps(self._in_value(document), indent=None if lines else 1) for document in documents
            ]
            return "\n".join(shown) + "\n"
        if re.search(r"^# (HELP|TYPE) ", text, re.MULTILINE):
            rows = text.split("\n")
            return "\n".join(row if row.startswith("#") else _LABEL.sub(self._label, row) for row in rows)
        return self.sentence(text)

    def _in_value(self, value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {
                re.sub(f"<{_PSEUDONYM}>", r"\1", self._patterns(name)): self._in_value(below, name)
                for name, below in value.items()
            }
        if isinstance(value, list):
            return [self._in_value(below, key) for below in value]
        if not isinstance(value, str):
            return value
        if _FIELDS.get(key) in _WHOLE_ONLY:
            return self._whole.get(value, value)
        return self.sentence(value)

    def _label(self, label: re.Match[str]) -> str:
        return f'{label[1]}="{self.sentence(label[2])}"'

    def sentence(self, text: str) -> str:
        """Redact free text: every name that forms a word in it."""
        text = self._patterns(text)
        if not self._pseudonyms:
            return text
        if self._pattern is None:
            names = "|".join(map(re.escape, sorted(self._pseudonyms, key=len, reverse=True)))
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])(?<!__)(?:{names})(?![A-Za-z0-9]){_NO_BUILD}")
        # Not within pseudonyms: a container may be called ``uuid``.
        parts = re.split(f"<{_PSEUDONYM}>", text)
        for number, part in enumerate(parts):
            redacted = self._pattern.sub(lambda name: self._pseudonyms[name[0]], part)
            parts[number] = part if number % 2 else redacted
        return "".join(parts)

    def _patterns(self, text: str) -> str:
        for kind, pattern in _PATTERNS:
            for name in set(pattern.findall(text)):
                text = text.replace(name, f"<{self._pseudonym(kind, name)}>")
        return text

    def _pseudonym(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name known by its form; a UUID has two spellings."""
        plain = name.lower().replace("_", "-")
        if plain not in self._whole:
            self._whole[plain] = self._next(kind)
        return self._whole[plain]


def _documents(text: str) -> Iterator[object]:
    """Yield the JSON documents of a text, whole or line by line; nothing for other text."""
    with suppress(ValueError):
        yield json.loads(text)
        return
    lines = list(filter(str.strip, text.splitlines()))
    for line in lines if all(line.startswith("{") for line in lines) else ():
        with suppress(ValueError):  # the last one may be cut off
            yield json.loads(line)
