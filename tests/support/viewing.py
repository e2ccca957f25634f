"""A viewer's pages, asked without a browser: over its own application, with its cookie, read by a parser of HTML."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import httpx

from lightningrl_runs.reader import open_run
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.runs import OneRun

__all__ = ["KEY", "ReadPage", "parse_page", "read_page", "viewing"]

KEY = "view-key-of-a-test"
_EMPTY = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)

_BLOCKS = frozenset({"article", "dd", "div", "dt", "h1", "h2", "h3", "li", "p", "section", "td", "th", "tr"})


@asynccontextmanager
async def viewing(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A browser's place that has shown its key."""
    async with open_run(folder) as run:
        viewed = ViewedRun(name="run", folder=folder, run=run)
        transport = httpx.ASGITransport(create_viewer(OneRun(viewed), key=KEY))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                await client.get("/", params={"key": KEY})
                yield client
        finally:
            viewed.credit.close()


@dataclass
class ReadPage(HTMLParser):
    """What a browser would make of a page."""

    html: str = ""
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list[tuple[str, dict[str, str]]])
    texts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list[tuple[str, tuple[str, ...]]])
    """Each with the elements around it, outermost first."""
    around: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    @property
    def text(self) -> str:
        return " ".join(
            "".join(text for text, around in self.texts if "body" in around and "script" not in around).split()
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag in _BLOCKS:
            self.texts.append((" ", tuple(self.around)))
        if tag not in _EMPTY:
            self.around.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.around:
            while self.around.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        self.texts.append((data, tuple(self.around)))


async def read_page(client: httpx.AsyncClient, address: str, status: int = 200) -> ReadPage:
    answer = await client.get(address)
    assert answer.status_code == status, f"{address}: {answer.status_code}\n{answer.text[:2000]}"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    return parse_page(answer.text)


def parse_page(html: str) -> ReadPage:
    page = ReadPage(html)
    page.feed(html)
    page.close()
    return page
