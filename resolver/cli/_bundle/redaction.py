"""Replaces names by pseudonyms, the same in every part of a bundle; in doubt, a word is replaced."""

import re
from collections import Counter
from collections.abc import Iterable

_UUID = r"[0-9a-fA-F]{8}[-_](?:[0-9a-fA-F]{4}[-_]){3}[0-9a-fA-F]{12}"
_ID = r"(?<![0-9a-fA-F])[0-9a-f]{64}(?![0-9a-fA-F])"
#: Short ids are the beginning of whole ones.
_SHORT = 12
_STRING = r'"((?:[^"\\]|\\.)+)"'
#: Names by the field, or by the label of a metric, or as parts of paths: HAMi's directories, kubelet's logs, homes.
_NAMES = (
    ("namespace", re.compile(rf'\bnamespace(?:": ?|=)(?!"(?:host|container|unknown)"){_STRING}')),
    ("pod", re.compile(rf'\bpod(?:": ?|=){_STRING}')),
    ("container", re.compile(rf'\bcontainer(?:_name": ?|_name=|=){_STRING}')),
    ("user", re.compile(rf'"user": ?{_STRING}')),
    ("container", re.compile(rf"{_UUID}_([a-z0-9][a-z0-9.-]*)")),
    ("namespace", re.compile(rf"([a-z0-9.-]+)_[a-z0-9.-]+_{_UUID}")),
    ("pod", re.compile(rf"[a-z0-9.-]_([a-z0-9.-]+)_{_UUID}")),
    ("user", re.compile(r"/home/([^/\s\"']+)")),
)
#: A string, even without its end. ``comm`` is redacted as a whole; in a key only ids are.
_IN_QUOTES = re.compile(r'(?m)("?\bcomm"?(?:: ?|=))?"((?:[^"\\\n]|\\.)*)("|$)(\s*:)?')
#: Python's version has ``(main, Apr 28 2025, ...)``, and ``main`` is also a common container name.
_NO_BUILD = r"(?!, [A-Z][a-z]{2} +\d)"


class Redactor:
    """Learns names from every part first, then replaces them."""

    def __init__(self, hostnames: Iterable[str] = ()) -> None:
        self._pseudonyms: dict[str, str] = {}
        self._others: dict[str, str] = {}  # of ids and commands, which are not searched as words
        self._numbers = Counter[str]()
        self._pattern: re.Pattern[str] | None = None
        for name in hostnames:
            self._pseudonym(self._pseudonyms, "host", name)

    def learn(self, text: str) -> None:
        for kind, pattern in _NAMES:
            for name in pattern.findall(text):
                self._pseudonym(self._pseudonyms, kind, name)
        for container_id in re.findall(_ID, text):
            self._pseudonyms.setdefault(container_id[:_SHORT], self._of_id(container_id))
        self._pattern = None

    def redact(self, text: str) -> str:
        """Return JSON or metrics without names; keys, numbers and metrics' names stay."""
        return _IN_QUOTES.sub(self._quoted, text)

    def _quoted(self, quoted: re.Match[str]) -> str:
        comm, text, end, colon = quoted.groups("")
        if comm:
            redacted = self._pseudonym(self._others, "command", text)
        elif colon:
            redacted = re.sub(f"{_UUID}|{_ID}", lambda match: self._of_id(match[0]), text)
        else:
            redacted = self.sentence(text)
        return f'{comm}"{redacted}{end}{colon}'

    def sentence(self, text: str) -> str:
        """Redact free text: every name that forms a word in it."""
        if self._pattern is None:
            names = "|".join(map(re.escape, sorted(self._pseudonyms, key=len, reverse=True))) or "(?!)"
            word = rf"(?<![A-Za-z0-9])(?<!__)(?:{names})(?![A-Za-z0-9]){_NO_BUILD}"
            self._pattern = re.compile(f"{_UUID}|{_ID}|{word}")
        return self._pattern.sub(lambda match: self._pseudonyms.get(match[0]) or self._of_id(match[0]), text)

    def _of_id(self, text: str) -> str:
        """Return the pseudonym of an id; a UUID has two spellings."""
        kind = "uuid" if re.fullmatch(_UUID, text) else "container-id"
        return self._pseudonym(self._others, kind, text.lower().replace("_", "-"))

    def _pseudonym(self, pseudonyms: dict[str, str], kind: str, name: str) -> str:
        if name not in pseudonyms:
            self._numbers[kind] += 1
            pseudonyms[name] = f"{kind}-{self._numbers[kind]}"
        return pseudonyms[name]
