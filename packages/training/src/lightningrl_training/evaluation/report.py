"""An evaluation from its words to its file: who is examined, against whom, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.private_files import create_private
from lightningrl.recipe import Recipe
from lightningrl.recipe_file import load_recipe, with_settings
from lightningrl_training.evaluation.candidate import Candidate, find_candidate, run_of
from lightningrl_training.evaluation.comparison import Comparison
from lightningrl_training.evaluation.examination import Examination, examine
from lightningrl_training.evaluation.result import Evaluation, read_evaluation
from lightningrl_training.run_sync import Show, show_nobody

__all__ = ["EvaluationReport", "Price", "evaluate_policies"]

Price = tuple[float, float]
"""Of a million prompt tokens, and of a million completion tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """The results of one policy, or of two on the same tasks."""

    evaluations: tuple[Evaluation, ...]
    comparison: Comparison | None
    """None = there was one policy."""
    slices: tuple[str, ...] = ()
    """Keys that were asked for."""
    path: Path
    """Its file."""

    def numbers(self) -> dict[str, Any]:
        """As JSON; of the evaluations what is computed, too."""
        rows = [{**msgspec.to_builtins(one), "summary": _summary(one, self.slices)} for one in self.evaluations]
        verdicts = None if self.comparison is None else {**msgspec.to_builtins(self.comparison), "verdict": self.comparison.verdict.value}
        if verdicts is not None and self.comparison is not None:
            for row, part in zip(verdicts["slices"], self.comparison.slices, strict=True):
                row["verdict"] = part.verdict.value
        return {"evaluations": rows, "comparison": verdicts}


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
    first = _with(find_candidate(policy, shared, api_key_env=api_key_env), settings)
    known = _known(against)
    if how.batch is not None and against is None:
        raise ConfigError("only a comparison can be decided before all tasks have run; name another policy: --against")
    candidates = [first]
    if against is not None and known is None:
        candidates.append(_with(find_candidate(against, first.recipe, api_key_env=api_key_env), settings))
    path = _place(policy, out)
    found, comparison = await examine(candidates, how, path.with_suffix(""), slices=slices, prices=prices, known=known, show=show)
    report = EvaluationReport(evaluations=tuple(found), comparison=comparison, slices=tuple(slices), path=path)
    with create_private(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report.numbers()), indent=1) + b"\n")
    return report


def _known(against: str | None) -> Evaluation | None:
    """The evaluation that lies in the file, where the words name one."""
    return read_evaluation(Path(against)) if against is not None and Path(against).is_file() else None


def _with(candidate: Candidate, settings: dict[str, Any] | None) -> Candidate:
    return replace(candidate, recipe=with_settings(candidate.recipe, settings)) if settings else candidate


def _place(policy: str, out: Path | None) -> Path:
    """A new file for the results."""
    run = run_of(policy)
    path = out or (run or Path()) / "evaluations" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    while out is None and path.exists():
        path = path.with_name(f"{path.stem}-again.json")
    if path.suffix != ".json":
        raise ConfigError(f"--out {str(path)!r} is no .json file; results are JSON, and rollouts go into a folder beside them")
    if path.exists() or path.with_suffix("").exists():
        raise RunFolderError(f"{str(path)!r} or the folder of its rollouts is there already; give another --out")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"folder {str(path.parent)!r} cannot be written: {error.strerror}; give another --out") from error
    return path


def _summary(one: Evaluation, slices: Sequence[str]) -> dict[str, Any]:
    return {
        "reward": msgspec.to_builtins(one.reward),
        "pass_at": {str(k): msgspec.to_builtins(one.pass_at(k)) for k in one.ks},
        "slices": {key: msgspec.to_builtins(one.slice_rewards(key)) for key in slices},
        "failed": one.failed,
        "without_result": one.without_result,
        "seconds": one.seconds,
        "tokens": one.tokens,
        "cost": one.cost,
    }
