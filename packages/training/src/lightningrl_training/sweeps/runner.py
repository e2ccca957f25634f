"""The runs of a sweep, one process each: those that have ended are left, one that was interrupted goes on.

<sweep>/finished.json   {point: ""}, or the sentence of a run that failed; written in one rename as each run ends
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lightningrl.errors import RunFolderError
from lightningrl.files import write_durably
from lightningrl.processes import open_private
from lightningrl.sanitize import one_line
from lightningrl_runs.metrics import read_rows
from lightningrl_runs.origin import read_object
from lightningrl_runs.summary import is_live
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.sweeps.plan import Point, SweepPlan

__all__ = ["ShowRun", "SweepRunner", "read_finished"]

FINISHED: Final = "finished.json"
LOOK_S: Final = 0.5
"""Seconds between looks at how far a run is."""
_STOPPED: Final = 130

ShowRun = Callable[[Point, str, int], object]
"""Told of a run what it is doing, and how many steps it has made."""


@dataclass(kw_only=True, slots=True)
class SweepRunner:
    """Runs what a sweep's plan has and its folder lacks."""

    plan: SweepPlan
    folder: Path
    jobs: int = 1
    """Runs at a time."""
    show: ShowRun = field(default=lambda point, what, steps: None)

    async def run(self) -> None:
        """Return once each run has ended, well or not. Where the task is cancelled, runs stop in order first."""
        places = asyncio.Semaphore(self.jobs)
        finished = read_finished(self.folder)
        async with asyncio.TaskGroup() as group:
            for point in self.plan.points:
                if finished.get(point.name) == "":
                    self.show(point, "done", _steps(self.folder / point.name))
                else:
                    group.create_task(self._run_in_turn(point, places))

    async def _run_in_turn(self, point: Point, places: asyncio.Semaphore) -> None:
        async with places:
            problem = await self._run_point(point)
            self._note(point, problem)
            self.show(point, problem or "done", _steps(self.folder / point.name))

    async def _run_point(self, point: Point) -> str:
        """Run or go on with a point; why it failed, empty where it did not."""
        run, log = self.folder / point.name, self.folder / "logs" / f"{point.name}.txt"
        while is_live(run):  # by a process that outlived its sweep, or a person's
            self.show(point, "trained by another process: waiting", _steps(run))
            await asyncio.sleep(LOOK_S)
        self.show(point, "starting", _steps(run))
        began = (run / "recipe.json").is_file()
        rest = ["--resume"] if began else [word for text in self.plan.texts(point) for word in ("--set", text)]
        command = [sys.executable, "-m", "lightningrl_training.sweeps.process", str(os.getpid())]
        with open_private(log) as output:
            start = output.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("train", str(self.plan.recipe), "--run", str(run), *rest),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "COLUMNS": "200"},
                start_new_session=True,  # Ctrl-C is for the sweep, which stops its runs once
            )
            try:
                await self._watch(point, process)
            finally:
                await _stop(process)
        output_text = log.read_bytes()[start:].decode(errors="replace")
        if process.returncode == 0 or self._is_through(run):
            return ""
        return _explain(output_text, process.returncode or 0, log)

    async def _watch(self, point: Point, process: asyncio.subprocess.Process) -> None:
        ending = asyncio.create_task(process.wait())
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=LOOK_S)
                if steps := _steps(self.folder / point.name):
                    self.show(point, "training", steps)
        finally:
            ending.cancel()

    def _is_through(self, run: Path) -> bool:
        """True where a run that ended with an error had made all its steps: what it says is its result."""
        made = checkpoints(run)
        steps = read_object(run / "recipe.json").get("loop", {}).get("steps")
        return bool(made) and made[-1].state.step == steps

    def _note(self, point: Point, problem: str) -> None:
        finished = {**read_finished(self.folder), point.name: problem}
        try:
            write_durably(self.folder / FINISHED, json.dumps(finished, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RunFolderError(
                f"sweep folder {str(self.folder)!r} cannot be written: {error.strerror}; free space, then give the "
                "same command again"
            ) from error


def read_finished(folder: Path) -> Mapping[str, str]:
    """Read which runs of a sweep have ended: empty text, or why they failed."""
    return {name: str(why) for name, why in read_object(folder / FINISHED).items()}


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a run in order, if it goes on. It writes what it has; nothing is lost if it is killed meanwhile."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        await asyncio.shield(process.wait())


def _steps(run: Path) -> int:
    try:
        rows = read_rows(run)
    except RunFolderError:
        return 0
    return max((int(row["step"]) for row in rows), default=0)


def _explain(output_text: str, status: int, log: Path) -> str:
    """The last error of a run's output, or how its process ended."""
    errors = [line for line in output_text.splitlines() if line.startswith("error: ")]
    if errors:
        return one_line(errors[-1].removeprefix("error: "), 400)
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = one_line(output_text.strip().rpartition("\n")[2], 200)
    return f"its process ended with {how}{f': {last}' if last else ''}; see {str(log)!r}"
