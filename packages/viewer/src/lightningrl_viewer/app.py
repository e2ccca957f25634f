"""The viewer as an application: the pages' routes over runs, below whatever path it is mounted at.

create_viewer(OneRun(…), key=…)          a live run's server       /  rollouts  …
create_viewer(OneFolder(path), key=…)    one run folder            /  rollouts  …
create_viewer(RunsFolder(path), key=…)   a folder of runs          /  runs/NAME/  runs/NAME/rollouts  …
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lightningrl.errors import LightningError
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_viewer.events import Place, stream_news
from lightningrl_viewer.forms import FORMS, Form
from lightningrl_viewer.guard import Guard, form_token
from lightningrl_viewer.page import NoSuchPage, Page, PageRequest, PageView, ViewedRun, read_state
from lightningrl_viewer.pages import PAGES
from lightningrl_viewer.pages.runs import show_runs
from lightningrl_viewer.runs import Runs, RunsFolder
from lightningrl_viewer.templates import STATIC, render, static_version

__all__ = ["create_viewer", "run_values"]

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
