"""Pages: where each is found, what it is called, and the function that makes its values.

Long texts are truncated: a page shows the beginning of each and links to the rest, so that no text makes it heavy.

    Budget(100_000).truncate("call-2-0", text, 2_000)  ─►  LongText(text="…", rest=998_000)

Values are computed again only when they may have changed, and never so often that a run would notice.

    get(key, make) ─► as before where the run is as it was ─► as before where the last is not paid for ─► make()
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.requests import Request

from lightningrl.errors import LightningError
from lightningrl.sanitize import printable
from lightningrl_runs.origin import read_import
from lightningrl_runs.queries.health import Position
from lightningrl_runs.reader import StoredRun
from lightningrl_runs.summary import is_live
from lightningrl_server.mounts import Live
from lightningrl_server.store.location import named_store
from lightningrl_viewer.credit import CreditXRays

__all__ = ["Budget", "Cache", "LongText", "NoSuchPage", "Page", "PageRequest", "PageView", "ViewedRun", "read_state"]


class NoSuchPage(LightningError):
    """A page, run or text that does not exist. HTTP 404."""


def read_state(query: QueryParams) -> QueryParams:
    """Return an address's query, with what a form handed back as `name*`, written as in an address, under its name."""
    return QueryParams(
        [
            (name.removesuffix("*"), unquote(value) if name.endswith("*") else value)
            for name, value in query.multi_items()
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ViewedRun:
    """A run that somebody looks at."""

    name: str
    folder: Path
    run: StoredRun
    home: str = ""
    """Path of its pages below the viewer: "" or "/runs/NAME", as an address has it."""
    live: Callable[[], Awaitable[Live]] | None = None
    """Asks the run's server for its state; None = the run is read from its folder."""
    cache: Cache = field(init=False)
    """Values that are dear to compute: `await viewed.cache.get(key, make)`."""
    credit: CreditXRays = field(init=False)
    """X-rays of the run: credit by every method."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", Cache(self.folder))
        object.__setattr__(self, "credit", CreditXRays(self.folder))

    @property
    def is_import(self) -> bool:
        """True for a run that an import made: nothing was trained in it."""
        return read_import(self.folder) is not None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageRequest:
    """Path and query of a page's address: the state of a page is all in its address."""

    path: Mapping[str, str] = field(default_factory=dict[str, str])
    """The parts of the path that a page's `{…}` name."""
    query: QueryParams = field(default_factory=QueryParams)

    @classmethod
    def read(cls, request: Request) -> PageRequest:
        return cls(path=request.path_params, query=read_state(request.query_params))

    def number(self, name: str) -> int | None:
        """Read a whole number of the query; None = it is not there. Raises NoSuchPage where it is none."""
        text = self.query.get(name)
        if not text:
            return None
        try:
            number = int(text)
        except ValueError:
            raise NoSuchPage(f"{name} is {text[:40]!r}, which is no number; leave it out, or write one") from None
        if abs(number) >= 2**31:
            raise NoSuchPage(f"there is no {name} {text[:40]}; leave it out, or write a smaller one")
        return number


class PageView:
    """A template and its values; `title` stands in the tab."""

    def __init__(self, template: str, *, title: str, **values: Any) -> None:
        self.template = template
        self.values = {"title": title, **values}


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a run."""

    path: str
    """Path below the run: "" is its first page; `{name}` takes one part of a path."""
    show: Callable[[ViewedRun, PageRequest], Awaitable[PageView]]
    name: str | None = None
    """Name in the navigation; None = it is not there."""
    key: str | None = None
    """Key that goes there after `g`."""
    tells_of_run_alone: bool = True
    """True for a page that is made again only when the run has written something; else each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongText:
    """Part of a text that a page shows."""

    name: str
    """Name by which the page of the whole text finds it."""
    text: str
    """Its beginning, cleaned."""
    end: int
    """End of that part: the first character that is not shown."""
    rest: int
    """Characters from there on."""


class Budget:
    """Bytes of HTML that a page's texts may take."""

    def __init__(self, size: int) -> None:
        self._left = size

    def truncate(self, name: str, text: str, most: int, *, start: int = 0) -> LongText:
        """Return at most `most` bytes of a text, from the character `start` on; nothing where the page is full."""
        limit = min(most, self._left)
        count = min(len(text) - start, limit)
        shown = printable(text[start : start + count])
        while (size := html_size(shown)) > limit:
            count = min(count - 1, count * limit // size)
            shown = printable(text[start : start + count])
        self._left -= size
        return LongText(name=name, text=shown, end=start + count, rest=len(text) - start - count)


def html_size(text: str) -> int:
    """Return the bytes of a text in a page."""
    quoted = 4 * (text.count("&") + text.count("'") + text.count('"')) + 3 * (text.count("<") + text.count(">"))
    return len(text.encode("utf-8", "replace")) + quoted


T = TypeVar("T")

_SHARE: Final = 0.005
"""Share of a core, at most, for all that is computed again of a run that goes on; a value nobody has asked for before
is computed at once."""
_LONGEST_S: Final = 15.0
"""Seconds that a value stands at most, also where a busy machine took long to compute it."""
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    token: Hashable
    """None = parts of it were older than the run already when it was made."""
    step: int
    """The last that had finished."""


class Cache:
    """Values of one run, pages among them. One that took 25 ms stands for 5 s while the run goes on, or until a step
    ends."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._is_file = named_store(folder).startswith("sqlite")
        self._clock = clock
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._position: Position | None = None
        self._free_at = 0.0
        """When something may be computed again."""
        self._making = 0
        """Values that are made at this moment: a page, and what it gets itself."""
        self._is_behind = False
        """True where the page that is made now got something older than the run."""

    def see(self, position: Position) -> None:
        """Note how far the store has come: all that tells of it where it is no file of the run's folder."""
        self._position = position

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        token, began = self._token(), self._clock()
        entry, step = self._entries.get(key), self._position.step if self._position else 0
        if entry is not None and (entry.token == token or (began < self._free_at and entry.step == step)):
            self._entries.move_to_end(key)
            self._is_behind = self._is_behind or entry.token != token
            value: T = entry.value
            return value
        is_whole = not self._making
        if is_whole:
            self._is_behind = False
        self._making += 1
        try:
            value = await make()
        finally:
            self._making -= 1
        self._entries[key] = _Entry(value, None if self._is_behind else token, step)
        if is_whole:
            now = self._clock()
            self._free_at = now + min((now - began) / _SHARE, _LONGEST_S)
        while len(self._entries) > _MOST:
            self._entries.popitem(last=False)
        return value

    def fresh_in(self, key: Hashable) -> float | None:
        """Return the seconds until a value that is older than the run may be computed again. None = it is as the run
        is, or unknown."""
        entry = self._entries.get(key)
        return None if entry is None or entry.token == self._token() else max(0.0, self._free_at - self._clock())

    def _token(self) -> Hashable:
        """Return a token that changes with what the run writes. A database does not say, so it may have been."""
        if not self._is_file:
            return object()
        token: list[Hashable] = [self._position, is_live(self._folder)]
        for name in ("store.sqlite", "store.sqlite-wal", "metrics.jsonl"):
            try:
                stat = (self._folder / name).stat()
            except OSError:
                continue
            token.append((name, stat.st_mtime_ns, stat.st_size))
        return tuple(token)
