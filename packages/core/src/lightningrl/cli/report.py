"""`lightningrl report`: a run's page as one file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rich.console import Console

from lightningrl.errors import RunFolderError
from lightningrl.look.reader import open_run
from lightningrl.training.run_folder import newest_run
from lightningrl.view.report import make_report

__all__ = ["report_command"]


MARK = b'<meta name="generator" content="LightningRL report">'


def report_command(folder: Path | None, *, html: Path, runs: Path) -> None:
    """Write it for its owner alone: it holds what agents were asked and said."""
    folder = folder or newest_run(runs)
    _check_free(html)

    async def make() -> str:
        async with open_run(folder) as run:
            return await make_report(run, folder)

    text = asyncio.run(make())
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
