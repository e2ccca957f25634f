"""Work that takes minutes: a bar of its progress, or lines where the output is a pipe; Ctrl-C and SIGTERM end it in
order, and are answered at once; and a folder that goes with it."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lightningrl.console import escape
from lightningrl.errors import Interruption, LightningError
from lightningrl.sanitize import printable

if TYPE_CHECKING:
    from lightningrl_training.run_sync import Show

__all__ = ["progress_bar", "scratch_folder", "show_phases", "stoppable"]

EVERY_S = 10.0
"""Seconds between two lines on the same work, where standard error is no terminal."""


@contextmanager
def stoppable(sentence: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM interrupt the work and raise Interruption(sentence)."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda *_: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        raise Interruption(sentence) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(sentence: str) -> Iterator[Show]:
    """Show a progress bar on standard error, for work that is `stoppable`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    if not console.is_terminal:
        with stoppable(sentence):
            yield _lines(console)
        return
    with stoppable(sentence), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(printable(what)), completed=done, total=total or None
        )


@contextmanager
def show_phases() -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being done: a spinner, or a line for each phase where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _lines(console)
        yield lambda what: lines(what, 0, 0)
        return
    with console.status("starting") as status:
        yield lambda what: status.update(escape(printable(what)))


def _lines(console: Console) -> Show:
    """Write a line for new work at once, and for more of the same every ten seconds."""
    last, at = "", 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal last, at
        now = time.monotonic()
        if what != last or now - at >= EVERY_S:
            last, at = what, now
            console.out(printable(f"{what} {done}/{total}" if total else what), highlight=False)

    return show


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder that goes with the command, unless what it ends with names a log in it."""
    folder, is_named = Path(tempfile.mkdtemp(prefix=prefix)), False
    try:
        yield folder
    except LightningError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
