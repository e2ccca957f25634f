"""The table `[warm_start]` of a recipe, checked before anything heavy loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pydantic
from pydantic import Field

from lightningrl.credentials import read_key
from lightningrl.errors import ConfigError, LightningError
from lightningrl.recipe import Recipe
from lightningrl_runs.origin import read_import
from lightningrl_training.evaluation.examination import Candidate, find_candidate
from lightningrl_training.tuning.rows import find_file
from lightningrl_training.tuning.settings import TuneSettings

__all__ = ["WarmStart", "find_mistakes", "read_warm_start"]


class _Table(pydantic.BaseModel):
    """Keys of the table."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    traces: Path | None = None
    """A curated folder, or a run folder, own or imported, that is curated on the way."""
    teacher: str | None = None
    """`"MODEL@https://…"`, a policy's folder, or a run whose policy was trained before."""
    threshold: float | None = None
    """Least reward of a rollout that is tuned on. None = the most that the rewards give; of imported traces none."""
    tasks: int = Field(default=100, ge=1)
    """Training tasks that the teacher is asked, the first ones."""
    samples: int = Field(default=1, ge=1)
    """Rollouts of each."""
    api_key_env: str | None = None
    """Environment variable with the teacher's key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Sources and settings of a warm start; either `rows`, `run` or `teacher` is set."""

    rows: Path | None
    """A curated folder."""
    run: Path | None
    """A run to be curated."""
    teacher: Candidate | None
    threshold: float | None
    """Least reward of a rollout; None = all that succeeded."""
    tasks: int
    samples: int
    tuning: TuneSettings
    """Settings of `[tune]`; its `data` is still to come."""


def read_warm_start(recipe: Recipe) -> WarmStart:
    """Read the table of a recipe and find what it names. Raises LightningError, a sentence."""
    try:
        table = _Table.model_validate(recipe.warm_start)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"][:1]))
        taken = ", ".join(sorted(_Table.model_fields))
        raise ConfigError(f"warm_start.{key}: {first['msg']}; it takes: {taken}") from None
    if (table.traces is None) == (table.teacher is None):
        has = "neither traces nor a teacher" if table.traces is None else "traces and a teacher"
        raise ConfigError(f"warm_start has {has}; give one of the two")
    if "data" in recipe.tune:
        raise ConfigError("warm_start makes the rows that are tuned on, and tune.data names others; leave one out")
    highest = recipe.reward_bounds[1]
    if table.threshold is not None and table.threshold > highest:
        raise ConfigError(f"warm_start.threshold is {table.threshold:g} and no reward is above {highest:g}; lower it")
    tuning = TuneSettings.read({**recipe.tune, "data": Path.cwd()}, recipe.folder)
    rows, run = (None, None) if table.traces is None else _find_traces(table.traces, recipe.folder, tuning)
    is_imported = run is not None and read_import(run) is not None
    return WarmStart(
        rows=rows,
        run=run,
        teacher=None if table.teacher is None else _find_teacher(table.teacher, table.api_key_env, recipe),
        threshold=highest if table.threshold is None and not is_imported else table.threshold,
        tasks=table.tasks,
        samples=table.samples,
        tuning=tuning,
    )


def find_mistakes(recipe: Recipe) -> list[str]:
    """Say what is wrong with the table, a sentence; none where all is well."""
    try:
        read_warm_start(recipe)
    except LightningError as error:
        return list(map(str, error.args))
    return []


def _find_traces(traces: Path, home: Path, tuning: TuneSettings) -> tuple[Path | None, Path | None]:
    """A curated folder, or a run."""
    place = next((path.resolve() for path in (home / traces, traces) if path.exists()), None)
    if place is None:
        raise ConfigError(f"warm_start.traces: no folder {str(traces)!r} beside the recipe or here; name one that is")
    if place.is_dir() and (place / "run.json").is_file():
        return None, place
    try:
        if place.is_dir() and find_file(place, tuning.method):
            return place, None
    except ConfigError:
        pass
    raise ConfigError(
        f"warm_start.traces: {str(traces)!r} is no run and has no {tuning.method}.jsonl; make a run of an export with "
        "`lightningrl import-traces`, or rows with `lightningrl curate`"
    )


def _find_teacher(text: str, api_key_env: str | None, recipe: Recipe) -> Candidate:
    if api_key_env is not None:
        read_key(api_key_env, os.environ, where="warm_start.api_key_env")
    beside = recipe.folder / text
    try:
        return find_candidate(str(beside.resolve()) if beside.exists() else text, recipe, api_key_env=api_key_env)
    except LightningError as error:
        raise ConfigError(f"warm_start.teacher: {error}") from None
