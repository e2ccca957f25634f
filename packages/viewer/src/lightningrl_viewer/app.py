"""The viewer as an application: the pages' routes over runs, below whatever path it is mounted at.

create_viewer(OneRun(…), key=…)          a live run's server       /  rollouts  …
create_viewer(OneFolder(path), key=…)    one run folder            /  rollouts  …
create_viewer(RunsFolder(path), key=…)   a folder of runs          /  runs/NAME/  runs/NAME/rollouts  …

News of a run come as server-sent events. They carry ids only: a page fetches what it shows.

GET events?after=12.880.9312   or the header Last-Event-ID, which a browser sends when it comes back
    id: 13.884.9390            step, attempt and call that the store has come to: they outlive the server
    data: {"steps": [13], "running": 4}

Each finished step is told once, however often the server is killed in between: all after the id that is asked for, in
order. What a resumed run takes back is told by `"back": true`; its steps come again when they are done again. Nobody
looks: nothing is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lightningrl.console import cancel_on_signals
from lightningrl.errors import LightningError, RunFolderError
from lightningrl_runs.origin import newest_run
from lightningrl_runs.queries.health import Position
from lightningrl_runs.reader import StoredRun
from lightningrl_runs.runs import run_folders
from lightningrl_server.process import Server, bind
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.location import has_store
from lightningrl_viewer.guard import Guard, form_token
from lightningrl_viewer.page import NoSuchPage, Page, PageRequest, PageView, ViewedRun, read_state
from lightningrl_viewer.pages import PAGES, all_pages
from lightningrl_viewer.pages.runs import show_runs
from lightningrl_viewer.runs import FORMS, Form, OneFolder, Runs, RunsFolder
from lightningrl_viewer.templates import STATIC, render, static_version

__all__ = ["Place", "create_viewer", "run_values", "stream_news", "view_command", "viewer_of"]

THEME: Final = "lightningrl-theme"
"""Cookie: dark or light, where somebody chose."""
FRESH_IN: Final = "x-fresh-in"
"""Header: the page is older than the run, and may be made again in so many seconds."""
_STATIC: Final = {path.name for path in STATIC.iterdir()}


def create_viewer(runs: Runs, *, key: str, pages: Sequence[Page] = PAGES, may_write: bool = False) -> ASGIApp:
    """Build pages for whoever shows the view key (`lightningrl.keys.view_key`). They only show; of a folder of runs,
    with `may_write`, they also take tags and notes, and delete a run."""
    may_write = may_write and isinstance(runs, RunsFolder)
    routes = [Route("/static/{version}/{name}", _static)]
    if isinstance(runs, RunsFolder):
        routes.append(Route("/", _of_folder(runs, may_write=may_write)))
        if may_write:
            routes += [
                Route(f"/runs/{{run}}/{path}", _of_form(runs, form, form_token(key)), methods=["GET", "POST"])
                for path, form in FORMS.items()
            ]
    home = "/runs/{run}" if isinstance(runs, RunsFolder) else ""
    routes.append(Route(f"{home}/events", _events(runs)))
    routes += [Route(f"{home}/{page.path}", _of_run(runs, page, pages)) for page in pages]
    routes.append(Route("/{path:path}", _answer(_nothing)))
    return Guard(Starlette(routes=routes), key=key, may_write=may_write)


def run_values(
    viewed: ViewedRun, page: Page, *, root: str, has_runs: bool, pages: Sequence[Page] = PAGES
) -> dict[str, Any]:
    """Return the values that every template of a run's page has."""
    home = f"{root}{viewed.home}"

    def url(path: str = "", **query: Any) -> str:
        """Address of a page of this run; what is None or empty is left out of the query."""
        return with_query(f"{home}/{quote(path, safe='/:')}", query)

    return {
        "run": viewed,
        "url": url,
        "runs_url": f"{root}/" if has_runs else None,
        "navigation": [
            entry
            for entry in pages
            if entry.name is not None and not (viewed.is_import and entry.path in ("credit", "recipe", "system"))
        ],
        "page": page,
    }


def with_query(path: str, query: dict[str, Any]) -> str:
    """Add a query to a path: what is None or empty is left out, a list is repeated."""
    filled = {name: value for name, value in query.items() if value is not None and value != "" and value != []}
    return f"{path}?{urlencode(filled, doseq=True)}" if filled else path


def _of_run(runs: Runs, page: Page, pages: Sequence[Page]) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        async with runs.viewed(request.path_params.get("run", "")) as viewed:
            # Before the page is made, so that nothing is missed between them.
            position = await viewed.run.queries.position(2**31)
            root, has_runs = request.scope.get("root_path", ""), isinstance(runs, RunsFolder)
            values = run_values(viewed, page, root=root, has_runs=has_runs, pages=pages)
            values["place"] = Place.of(position)

            async def make() -> str:
                shown = await page.show(viewed, PageRequest.read(request))
                return await _write(request, shown, values)

            if not page.tells_of_run_alone:
                return HTMLResponse(await make())
            key = "page", request.url.path, request.url.query, _theme(request)
            viewed.cache.see(position)
            html, fresh_in = await viewed.cache.get(key, make), viewed.cache.fresh_in(key)
            return HTMLResponse(html, headers={} if fresh_in is None else {FRESH_IN: f"{fresh_in:.2f}"})

    return _answer(handle)


def _events(runs: Runs) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        after = Place.read(request.headers.get("last-event-id") or request.query_params.get("after", ""))

        async def stream() -> AsyncIterator[str]:
            async with runs.viewed(request.path_params.get("run", "")) as viewed:
                async for event in stream_news(viewed.run, after, request.is_disconnected):
                    yield event

        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )

    return endpoint


async def _nothing(request: Request) -> Response:
    raise NoSuchPage(f"there is no page {request.url.path[:200]!r} here; go back to the first")


def _of_form(runs: RunsFolder, form: Form, token: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        answer = await form(runs, request, token)
        return answer if isinstance(answer, Response) else HTMLResponse(await _write(request, answer, {}))

    return _answer(handle)


def _of_folder(runs: RunsFolder, *, may_write: bool) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        values = {"url": lambda **query: with_query(f"{root}/", query), "may_write": may_write}
        return HTMLResponse(await _write(request, await show_runs(runs, PageRequest.read(request)), values))

    return _answer(handle)


def _answer(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Answer with a page also where something is wrong."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request)
        except LightningError as error:
            status = 404 if isinstance(error, UnknownRecord | NoSuchPage) else 503
            title = "Not found" if status == 404 else "Not readable"
            if request.method == "POST":
                status, title = 400, "Not done"
            shown = PageView("error.html", title=title, sentence=str(error))
            return HTMLResponse(await _write(request, shown, {}), status_code=status)

    return endpoint


async def _write(request: Request, shown: PageView, values: dict[str, Any]) -> str:
    root = request.scope.get("root_path", "")
    whole = {
        **_FRAME,
        "root": root,
        "home_url": f"{root}/",
        "asset": lambda name: f"{root}/static/{static_version()}/{name}",
        "theme": _theme(request),
        "query": read_state(request.query_params),
        **values,
        **shown.values,
    }
    return await asyncio.to_thread(render, shown.template, whole)


_FRAME: Final[dict[str, Any]] = {
    "place": None,
    "navigation": (),
    "page": None,
    "run": None,
    "runs_url": None,
    "is_report": False,
}
"""Values of a page without a run."""


def _theme(request: Request) -> str | None:
    chosen = request.cookies.get(THEME)
    return chosen if chosen in {"dark", "light"} else None


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        return Response(status_code=404)
    return FileResponse(STATIC / name, headers={"cache-control": "private, max-age=31536000, immutable"})


INTERVAL_S: Final = 1.0
"""Seconds between two looks at the store: a page is fetched no more often."""
IDLE_S: Final = 2.0
"""Seconds between two looks where nothing has happened for a while."""
_LOOKS: Final = 30
"""Looks without news until that is so."""
_STILL_HERE: Final = 10
"""Looks between two comments, by which a peer that has gone is noticed."""
_LARGEST: Final = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place in a run up to which somebody has heard."""

    step: int = 0
    attempt: int = 0
    call: int = 0

    @classmethod
    def read(cls, text: str) -> Place | None:
        """Read an event's id; None where it is none."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
            return None
        step, attempt, call = (min(int(part), _LARGEST) for part in parts)
        return cls(step=step, attempt=attempt, call=call)

    @classmethod
    def of(cls, position: Position) -> Place:
        return cls(step=position.step, attempt=position.attempt, call=position.call)

    def __str__(self) -> str:
        return f"{self.step}.{self.attempt}.{self.call}"


async def stream_news(
    run: StoredRun, after: Place | None, is_gone: Callable[[], Awaitable[bool]], *, interval_s: float = INTERVAL_S
) -> AsyncIterator[str]:
    """Yield events until `is_gone`. `after` None: from now on."""
    yield "retry: 1000\n\n"
    place, running, quiet = after, -1, 0
    while not await is_gone():
        try:
            position = await run.queries.position(place.step if place is not None else _LARGEST)
        except LightningError:  # its folder went, or its store is closed: the browser asks again
            return
        now = Place.of(position)
        is_news = place is not None and (now != place or running not in (-1, position.running))
        if place is None or is_news:
            is_back = place is not None and now.step < place.step
            news = {
                "steps": list(position.later_steps),
                "running": position.running,
                **({"back": True} if is_back else {}),
            }
            now = Place(step=max(position.later_steps, default=now.step), attempt=now.attempt, call=now.call)
            yield f"id: {now}\ndata: {json.dumps(news)}\n\n"
            quiet = 0
        elif (quiet := quiet + 1) % _STILL_HERE == 0:
            yield ": still here\n\n"
        place, running = now, position.running
        await asyncio.sleep(interval_s if quiet < _LOOKS else max(interval_s, IDLE_S))


def view_command(folder: Path | None, *, runs: Path, port: int, browser: bool, may_write: bool = False) -> None:
    folder = folder or newest_run(runs)
    is_run = has_store(folder)
    if not is_run and not run_folders(folder):
        raise RunFolderError(f"no run in {str(folder)!r}, nor below it; name a run folder, or a folder of runs")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_view(folder, port, is_run=is_run, browser=browser, may_write=may_write))


async def _view(folder: Path, port: int, *, is_run: bool, browser: bool, may_write: bool) -> None:
    cancel_on_signals()
    key = secrets.token_urlsafe(24)
    async with viewer_of(folder, key, is_run=is_run, may_write=may_write) as app:
        listener = bind("127.0.0.1", port)
        link = f"http://127.0.0.1:{listener.getsockname()[1]}/?key={key}"
        console = Console()
        console.print(f"{folder}: {link}", highlight=False, soft_wrap=True)
        console.print("stop it with Ctrl-C", highlight=False)
        if browser:
            webbrowser.open(link)
        await Server(
            uvicorn.Config(app, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1)
        ).serve([listener])


@asynccontextmanager
async def viewer_of(folder: Path, key: str, *, is_run: bool, may_write: bool = False) -> AsyncIterator[ASGIApp]:
    """The application, which wants this key."""
    runs = OneFolder(folder) if is_run else RunsFolder(folder)
    try:
        if isinstance(runs, OneFolder):
            async with runs.viewed() as viewed:  # one that cannot be read is refused at once
                # The first look reads every rollout: now, and not for somebody's page.
                await viewed.run.queries.reward_values()
        yield create_viewer(runs, key=key, pages=all_pages(), may_write=may_write and os.access(folder, os.W_OK))
    finally:
        await runs.close()
