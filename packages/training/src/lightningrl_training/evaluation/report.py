"""An evaluation from what a user writes to its file: who is examined, against whom, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.files import create_private
from lightningrl.recipe import Recipe
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_training.evaluation.examination import Candidate, Examination, examine, find_candidate, run_of
from lightningrl_training.evaluation.result import Comparison, Evaluation, read_evaluation
from lightningrl_training.run_sync import Show, show_nobody

__all__ = ["EvaluationReport", "Price", "evaluate_policies"]

Price = tuple[float, float]
"""Price of a million prompt tokens, and of a million completion tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """The results of one policy, or of two on the same tasks."""

    evaluations: tuple[Evaluation, ...]
    comparison: Comparison | None
    """None = there was one policy."""
    slices: tuple[str, ...] = ()
    """Keys of slices that were asked for."""
    path: Path
    """File of the report."""

    def numbers(self) -> dict[str, Any]:
        """Values for JSON, with what is computed from the evaluations."""
        rows = [{**msgspec.to_builtins(one), "summary": _summary(one, self.slices)} for one in self.evaluations]
        if self.comparison is None:
            return {"evaluations": rows, "comparison": None}
        parts = self.comparison.slices
        slices = [{**msgspec.to_builtins(part), "verdict": part.verdict.value} for part in parts]
        verdict = self.comparison.verdict.value
        comparison = {**msgspec.to_builtins(self.comparison), "slices": slices, "verdict": verdict}
        return {"evaluations": rows, "comparison": comparison}


async def evaluate_policies(
    policy: str,
    how: Examination,
    *,
    recipe: Path | Recipe | None = None,
    against: str | None = None,
    slices: Sequence[str] = (),
    api_key_env: str | None = None,
    prices: Sequence[Price | None] = (),
    out: Path | None = None,
    settings: dict[str, Any] | None = None,
    show: Show = show_nobody,
) -> EvaluationReport:
    """See `lightningrl.evaluate`."""
    shared = load_recipe(recipe) if isinstance(recipe, Path) else recipe

    def find(text: str, shared: Recipe | None) -> Candidate:
        candidate = find_candidate(text, shared, api_key_env=api_key_env)
        return replace(candidate, recipe=with_settings(candidate.recipe, settings)) if settings else candidate

    candidates = [find(policy, shared)]
    earlier = _read_earlier(against)
    if how.batch is not None and against is None:
        raise ConfigError("only a comparison can be decided before all tasks have run; name another policy: --against")
    if against is not None and earlier is None:
        candidates.append(find(against, candidates[0].recipe))
    path = _place(policy, out)
    evaluations, comparison = await examine(
        candidates, how, path.with_suffix(""), slices=slices, prices=prices, earlier=earlier, show=show
    )
    report = EvaluationReport(evaluations=tuple(evaluations), comparison=comparison, slices=tuple(slices), path=path)
    with create_private(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report.numbers()), indent=1) + b"\n")
    return report


def _read_earlier(against: str | None) -> Evaluation | None:
    """Read the evaluation in the file that the text names; None where it names none."""
    return read_evaluation(Path(against)) if against is not None and Path(against).is_file() else None


def _place(policy: str, out: Path | None) -> Path:
    """Choose a new file for the results."""
    run = run_of(policy)
    path = out or (run or Path()) / "evaluations" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    while out is None and path.exists():
        path = path.with_name(f"{path.stem}-again.json")
    if path.suffix != ".json":
        raise ConfigError(
            f"--out {str(path)!r} is no .json file; results are JSON, and rollouts go into a folder beside them"
        )
    if path.exists() or path.with_suffix("").exists():
        raise RunFolderError(f"{str(path)!r} or the folder of its rollouts is there already; give another --out")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"folder {str(path.parent)!r} cannot be written: {error.strerror}; give another --out"
        ) from error
    return path


def _summary(evaluation: Evaluation, slices: Sequence[str]) -> dict[str, Any]:
    return {
        "reward": msgspec.to_builtins(evaluation.reward),
        "pass_at": {str(k): msgspec.to_builtins(evaluation.pass_at(k)) for k in evaluation.ks},
        "slices": {key: msgspec.to_builtins(evaluation.slice_rewards(key)) for key in slices},
        "failed": evaluation.failed,
        "without_result": evaluation.without_result,
        "seconds": evaluation.seconds,
        "tokens": evaluation.tokens,
        "cost": evaluation.cost,
    }
