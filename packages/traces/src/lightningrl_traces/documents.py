"""JSON documents of a file of any size, one at a time: lines, items of a list, items below a key, or the whole.

{"a": 1}⏎{"a": 2}            two documents          [{…}, {…}]                      two
{"data": [{…}], "meta": …}   those of "data"        {⏎ "schema_version": …⏎}        one
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, cast

import ijson

from lightningrl.errors import ConfigError
from lightningrl.sanitize import DoubledKeyError, clean_json, unique_keys
from lightningrl_runs.foreign import dict_of, dicts_of
from lightningrl_server.inflate import BadBody, check_values

__all__ = [
    "LONGEST",
    "UNREADABLE",
    "begin",
    "dict_of",
    "dicts_of",
    "has_lines",
    "name_document",
    "open_source",
    "read_documents",
    "read_items",
    "refuse",
]

LONGEST: Final = 256 * 2**20
"""Bytes of one document."""
MOST_VALUES: Final = 4_000_000
"""Values of one document. Each takes 100 bytes or so once read."""
_TOO_MUCH: Final = f"a document of more than {LONGEST // 2**20} MiB, or of more than {MOST_VALUES} values"
_HEAD: Final = 65_536
_EVENTS: Final = 100_000
"""Parts of a file's first document, at most, by which its format is told."""
_LINE: Final = 16 * 2**20
"""Bytes of a first line that is read whole."""
_MARK: Final = b"\xef\xbb\xbf"
_OPENS: Final = frozenset({"start_map", "start_array"})
_CLOSES: Final = frozenset({"end_map", "end_array"})
_DEEPEST: Final = 500
"""Levels of lists and objects: a parser that knows each value's place keeps all places above it."""
_TEXTS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(".*)', re.DOTALL)
"""Texts of JSON, and one that goes on in the next piece."""
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_AS_LISTS: Final = bytes.maketrans(b"{}", b"[]")
UNREADABLE: Final = (OSError, EOFError, zlib.error)
"""Errors of a file that cannot be read or unpacked."""
LISTS: Final = ("data", "observations", "spans", "runs")
"""Keys below which an export of several documents has them."""


class _Shallow:
    """A file of JSON that is refused where it is nested too deeply or holds too much, before a parser builds that."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.values = self.bytes = 0
        """Values and bytes since somebody set both to 0."""
        self._depth = 0
        self._rest = b""
        """Beginning of a text, or of an escape in it, that the next piece goes on with."""

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        plain = _TEXTS.sub(rb"\1", self._rest + piece)
        self.values += plain.count(b",") + plain.count(b"[") + plain.count(b"{")
        self.bytes += len(piece)
        if self.values > MOST_VALUES or self.bytes > LONGEST:
            raise ValueError(_TOO_MUCH)
        brackets, mark, text = plain.partition(b'"')
        is_escape = (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
        self._rest = mark + (b"\\" if is_escape else b"")
        brackets = brackets.translate(_AS_LISTS, _NO_BRACKETS)
        levels = 0
        while b"[]" in brackets and levels <= _DEEPEST:
            brackets, levels = brackets.replace(b"[]", b""), levels + 1
        closed = brackets.count(b"]")
        if self._depth + len(brackets) - closed + levels > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
        self._depth += len(brackets) - 2 * closed
        return piece


class _Once(dict[str, Any]):
    """An object that tells `again` of a key that comes again: ijson passes over what it raises."""

    __slots__ = ("_again",)

    def __init__(self, again: list[str]) -> None:
        super().__init__()
        self._again = again

    def __setitem__(self, key: str, value: Any) -> None:
        self._again += [key] if key in self else ()
        super().__setitem__(key, value)


def open_source(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked where it is gzip's."""
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path)) if is_packed else path.open("rb")


def begin(path: Path) -> tuple[bytes, Any]:
    """Return the first bytes of a file and its first document, or its beginning where that is large; None where it is
    no JSON."""
    with open_source(path) as file:
        head = file.read(_HEAD)
        file.seek(0)
        _, document = _first_line(file)
        if document is None:
            file.seek(len(_MARK) if head.startswith(_MARK) else 0)
            document = _outline(file)
    document = clean_json(document, cut=True)
    for key, value in document.items() if isinstance(document, dict) else ():
        if key in LISTS and isinstance(value, list):
            document = value
        if key != "meta":
            break
    return head, next(iter(document), None) if isinstance(document, list) else document


def has_lines(path: Path) -> bool:
    """True where a file has a document in each line."""
    with open_source(path) as file:
        line, document = _first_line(file)
    return line.endswith(b"\n") and document is not None


def _first_line(file: IO[bytes]) -> tuple[bytes, Any]:
    """The first line, as far as it is read, and the document that it is; None where it is none."""
    try:
        line = file.readline(_LINE)
        check_values(line)
        document = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError, BadBody, *UNREADABLE):
        return b"", None
    return line, document if isinstance(document, dict | list) else None


def _outline(file: IO[bytes]) -> Any:
    """The first document of a file, up to `_EVENTS` of its parts."""
    builder, depth = ijson.ObjectBuilder(), 0
    try:
        for event, value in islice(ijson.basic_parse(_Shallow(file), use_float=True, multiple_values=True), _EVENTS):
            builder.event(event, value)
            depth += (event in _OPENS) - (event in _CLOSES)
            if depth == 0:
                break
    except (ijson.JSONError, ValueError, *UNREADABLE):
        return None
    return getattr(builder, "value", None)


def read_documents(path: Path) -> Iterator[Any]:
    """Read each document. Raises ConfigError naming the line, or the place, that is no JSON."""
    with open_source(path) as file:
        start = file.read(_HEAD).lstrip(b"\xef\xbb\xbf \t\r\n")
        file.seek(0)
        if not start:
            return
        key = None if start[:1] == b"[" else _list_key(file, path)
        file.seek(0)
        if start[:1] == b"[":
            yield from read_items(file, "item", path)
        elif key is not None:
            yield from read_items(file, f"{key}.item", path)
        elif start.partition(b"\n")[0].rstrip() != b"{":  # no opening of an indented document
            yield from _read_lines(file, path)
        else:
            yield _whole(file, path)


def name_document(path: Path, number: int, title: str | None = None) -> str:
    """Name a document that tells no rollout of its own. No other document of a source has it, whatever its file and its
    `title` are: rows that answer the same question often have its id."""
    place = blake2b(f"{path}:{number}".encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{title or path.stem}-{number}-{place}"


def read_items(file: IO[bytes], prefix: str, path: Path) -> Iterator[Any]:
    """Read the values at a place of one large document (`ijson`'s prefix). Raises ConfigError."""
    number, again = 0, list[str]()
    try:
        shallow, once = _Shallow(file), partial(_Once, again)
        items = ijson.items(shallow, prefix, map_type=once, use_float=True, multiple_values=True)
        for number, item in enumerate(items, 1):  # noqa: B007
            shallow.values = shallow.bytes = 0
            if again:
                raise DoubledKeyError(again[0])
            yield clean_json(item, cut=True)
    except (ijson.JSONError, ValueError, *UNREADABLE) as error:
        raise refuse(path, f"after document {number}", error) from error


def refuse(path: Path, place: str, error: Exception) -> ConfigError:
    problem = " ".join(str(error).split())[:120]
    return ConfigError(
        f"{str(path)!r} cannot be read {place}: {problem}; nothing is imported: export it again, or cut it there"
    )


def _read_lines(file: IO[bytes], path: Path) -> Iterator[Any]:
    number = 0
    try:
        while line := file.readline(LONGEST + 1):
            number += 1
            if line.strip():
                yield _parse(line)
    except (ValueError, RecursionError, *UNREADABLE) as error:
        raise refuse(path, f"at line {number}", error) from error


def _parse(text: bytes) -> Any:
    """Parse a document. Raises ValueError or RecursionError."""
    try:
        if len(text) > LONGEST:
            raise ValueError(_TOO_MUCH)
        decoded = text.decode(json.detect_encoding(text))
        if len(text) > MOST_VALUES:
            check_values(decoded.encode(), MOST_VALUES)
        return clean_json(json.loads(decoded, object_pairs_hook=unique_keys), cut=True)
    except BadBody:
        raise ValueError(_TOO_MUCH) from None


def _list_key(file: IO[bytes], path: Path) -> str | None:
    """The key of a document whose value is the list of documents; None where it is a document itself."""
    try:
        for prefix, event, value in ijson.parse(_Shallow(file), use_float=True, multiple_values=True):
            if prefix == "" and (event == "end_map" or (event == "map_key" and value not in (*LISTS, "meta"))):
                return None
            if event == "start_array" and prefix in LISTS:
                return str(prefix)
    except (ijson.JSONError, ValueError, *UNREADABLE):
        return None  # whoever reads it whole says where
    return None


def _whole(file: IO[bytes], path: Path) -> Any:
    try:
        return _parse(file.read(LONGEST + 1))
    except (ValueError, RecursionError, *UNREADABLE) as error:
        raise refuse(path, "as JSON", error) from error
