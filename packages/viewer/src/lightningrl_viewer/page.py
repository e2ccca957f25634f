"""Pages: where each is found, what it is called, and the function that makes its values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.requests import Request

from lightningrl.errors import LightningError
from lightningrl_server.mounts import Live
from lightningrl_viewer.cache import Cache
from lightningrl_viewer.credit import CreditXRays
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["NoSuchPage", "Page", "PageRequest", "PageView", "ViewedRun", "read_state"]


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
