"""A run in one file, to be sent to a colleague: the page Run and the rollouts worth reading, with style and no
script."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from lightningrl.errors import RunFolderError
from lightningrl_runs.origin import newest_run
from lightningrl_runs.queries.rollout_query import RolloutQuery
from lightningrl_runs.queries.rollout_rows import Sort
from lightningrl_runs.reader import StoredRun, ask_run
from lightningrl_viewer.page import PageRequest, ViewedRun
from lightningrl_viewer.pages import rollouts
from lightningrl_viewer.pages import run as run_page
from lightningrl_viewer.templates import STATIC, render

__all__ = ["make_report", "write_report"]

_ROLLOUTS: Final = 24
MARK: Final = b'<meta name="generator" content="LightningRL report">'


async def make_report(run: StoredRun, folder: Path) -> str:
    """Return the report as HTML."""
    viewed = ViewedRun(name=folder.absolute().name, folder=folder, run=run)  # noqa: ASYNC240
    shown = await run_page.PAGE.show(viewed, PageRequest())
    rows = await run.queries.list_rows(RolloutQuery(), Sort.DISAGREE, None, _ROLLOUTS)
    shown_rollouts = []
    for row in rows:
        trace = await run.trace(row.id)
        shown_rollouts.append(
            (row, rollouts.shorten_calls(trace), rollouts.shorten_exchanges(trace), rollouts.find_answer(trace))
        )
    values: dict[str, Any] = {
        "is_report": True,
        "first_page": shown.template,
        "css": (STATIC / "style.css").read_text(encoding="utf-8"),
        "run": viewed,
        "url": None,
        "theme": None,
        "query": {},
        "found": shown_rollouts,
    }
    return render("report.html", {**values, **shown.values})


def write_report(folder: Path | None, *, html: Path, runs: Path) -> None:
    """Write it for its owner alone: it holds what agents were asked and said."""
    folder = folder or newest_run(runs)
    _check_free(html)
    text = asyncio.run(ask_run(folder, lambda run: make_report(run, folder)))
    try:
        with os.fdopen(os.open(html, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text.encode())
    except OSError as error:
        raise _cannot_write(html, error) from error
    Console().print(f"wrote {html}: {len(text.encode()) / 1000:.0f} kB, with everything in it", highlight=False)


def _check_free(html: Path) -> None:
    """Raise RunFolderError where another file than an earlier report lies there."""
    if not html.is_file():
        return
    try:
        with html.open("rb") as file:
            is_ours = MARK in file.read(4096)
    except OSError as error:
        raise _cannot_write(html, error) from error
    if not is_ours:
        raise RunFolderError(f"{str(html)!r} is there already, and no report; give another file: --html")


def _cannot_write(html: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"the report cannot be written to {str(html)!r}: {error.strerror}; give another file")
