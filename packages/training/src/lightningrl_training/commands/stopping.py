"""Work that takes minutes: a bar of its progress; Ctrl-C and SIGTERM end it in order, and are answered at once; and a
folder that goes with it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightningrl.console import escape
from lightningrl.errors import Interruption, LightningError
from lightningrl.sanitize import printable
from lightningrl_training.run_sync import Show

__all__ = ["progress_bar", "scratch_folder", "stoppable"]


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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with stoppable(sentence), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(printable(what)), completed=done, total=total or None
        )


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
