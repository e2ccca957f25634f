"""Parts that commands share: options with one meaning everywhere, signals that stop them, JSON, and text that any
terminal can show."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "NewestRunOption",
    "RunArgument",
    "RunsOption",
    "accept_any_text",
    "cancel_on_signals",
    "escape",
    "number",
    "write_json",
]

NewestRunOption = Annotated[
    Path | None, typer.Option("--run", help="The run folder; by default the newest below --runs.", show_default=False)
]
RunArgument = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders lie.")]


def cancel_on_signals(announce: Callable[[], object] = lambda: None) -> None:
    """Cancel the task that calls this when the process is told to stop; `announce` is called the first time."""
    import asyncio

    task = asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def stop(number: int) -> None:
        if not signals:
            announce()
        signals.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def accept_any_text() -> None:
    r"""Make standard output and error write `?` for a character that their encoding lacks, instead of raising. A stream
    with another rule, as standard error's `\\u2192`, keeps it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def escape(text: str) -> str:
    """Escape rich markup, so that text is shown as it is."""
    from rich.markup import escape as escape_markup

    return escape_markup(text)


def number(value: float | None) -> str:
    """Write a reward or its like, which may be missing, as tables show it."""
    return "-" if value is None else f"{value:.3f}"


def write_json(value: object) -> None:
    """Write one line of JSON to standard output; arrays of numpy as lists, numbers that are none as null."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value, enc_hook=lambda of_numpy: of_numpy.tolist()) + b"\n")
