"""`lightningrl export-rollouts`: a run's rollouts in a format of the field, as one file."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, cast

from rich.console import Console

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.records import RolloutFilter
from lightningrl.types import RolloutMode
from lightningrl_credit.trained_calls import TrainedCalls, calls_left_out, trained_calls_of
from lightningrl_viewer.reading.origin import RunOrigin, newest_run
from lightningrl_viewer.reading.reader import StoredRun, open_run
from lightningrl_viewer.rollout_files import FORMATS, RolloutFormat, StoredRollout, completion_mask, write_document

__all__ = ["export_command", "list_stored"]

_AT_ONCE: Final = 64
"""Rollouts that are read together."""
_ALL: Final = 10_000_000


def export_command(folder: Path | None, *, form: str, to: Path | None, runs: Path, mode: str | None) -> None:
    """Write it for its owner alone: it holds what agents were asked and said."""
    if form not in FORMATS:
        raise ConfigError(f"no format {form!r}; choose of: {', '.join(FORMATS)}")
    if mode is not None and mode not in set(RolloutMode):
        raise ConfigError(f"no mode {mode!r}; choose of: {', '.join(RolloutMode)}")
    folder = folder or newest_run(runs)
    path = to or Path(f"rollouts.{form}.jsonl")
    origin = RunOrigin.read(folder)
    written, running, silent = asyncio.run(
        _export(folder, origin, cast("RolloutFormat", form), path, None if mode is None else RolloutMode(mode))
    )
    left_out = [f"{running} that have not ended"] if running else []
    left_out += [f"{silent} that called no policy, for which the format has no place"] if silent else []
    rest = f"; left out: {', '.join(left_out)}" if left_out else ""
    Console().print(f"wrote {path}: {written} rollouts, {form}, one a line{rest}", highlight=False, soft_wrap=True)


async def _export(
    folder: Path, origin: RunOrigin, form: RolloutFormat, path: Path, mode: RolloutMode | None
) -> tuple[int, int, int]:
    """Return how many were written, run still, and have no place in the format."""
    written = silent = 0
    async with open_run(folder) as run:
        ids = await _ended(run, mode)
        try:
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
        except FileExistsError:
            raise RunFolderError(f"{str(path)!r} is there already; name another file: --to") from None
        except OSError as error:
            raise RunFolderError(
                f"the rollouts cannot be written to {str(path)!r}: {error.strerror}; name another file: --to"
            ) from error
        with file:
            async for rollout in list_stored(run, ids[0], trained_calls_of(origin.recipe)):
                messages = await asyncio.to_thread(run.messages, rollout.trajectory)
                document = write_document(rollout, form, messages, agent=origin.recipe.name)
                if document is None:
                    silent += 1
                    continue
                file.write(json.dumps(document, allow_nan=False) + "\n")
                written += 1
    return written, ids[1], silent


async def _ended(run: StoredRun, mode: RolloutMode | None) -> tuple[list[str], int]:
    """Return the rollouts that have ended, oldest first, and the number of those that have not."""
    records = await run.list_rollouts(RolloutFilter(mode=mode, limit=_ALL))
    ended = [record.id for record in records if record.outcome is not None]
    return ended[::-1], len(records) - len(ended)


async def list_stored(
    run: StoredRun, rollout_ids: list[str], trained: Mapping[str, TrainedCalls]
) -> AsyncIterator[StoredRollout]:
    """Read rollouts that have ended, in the order asked. `trained`: the calls of each policy that are training data."""
    for start in range(0, len(rollout_ids), _AT_ONCE):
        some = rollout_ids[start : start + _AT_ONCE]
        scores = {score.rollout_id: score for score in await run.look.scores(some)}
        for trajectory in await run.look.trajectories(some):
            calls, score = trajectory.transitions, scores.get(trajectory.rollout_id)
            left_out = calls_left_out(calls, trained)
            yield StoredRollout(
                trajectory=trajectory,
                masks={call.id: completion_mask(call, is_left_out=call.id in left_out) for call in calls},
                advantages={} if score is None else score.advantages,
            )
