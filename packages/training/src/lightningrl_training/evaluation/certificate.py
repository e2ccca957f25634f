"""A certificate of a finished run: was each token trained as it was sampled, and would the trainer have given it the
same probability?

store ─► find_places ─► recompute ─► judge_gaps, judge_steps (recomputation.py, gap.py) ┐
steps ─► find_trained (trained_tokens.py) ──────────────────────────────────────────────┴─► Certificate
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightningrl.errors import RunFolderError
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.evaluation.gap import Check, Gap, judge_gaps
from lightningrl_training.evaluation.recomputation import find_places, judge_steps, recompute
from lightningrl_training.evaluation.trained_tokens import find_trained
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import open_run

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A certificate of a run's tokens."""

    checks: tuple[Check, ...]
    gaps: Mapping[str, tuple[Gap, ...]]
    """Gaps by policy: of all tokens, then by version, by number of the call, by position in the row."""
    tokens: int
    """Sampled tokens of all rollouts."""
    recomputed: int
    """Sampled tokens whose weights are at hand."""
    trained: int
    """Tokens in rows that teach, over all steps."""
    trained_unique: int
    """Different tokens among `trained`."""
    trained_unsampled: int
    """Tokens among `trained` that were not sampled, or were after other tokens."""

    @property
    def is_passed(self) -> bool:
        return all(check.is_passed is not False for check in self.checks)


async def certify(folder: Path) -> Certificate:
    """Certify a run that has a checkpoint and recorded calls. Nothing is written. Raises LightningError."""
    origin = RunOrigin.read(folder)
    if not checkpoints(folder):
        raise RunFolderError(f"run {str(folder)!r} has no checkpoint yet; train it first")
    async with open_run(folder) as run:
        places, tokens = await find_places(run)
        if not tokens:
            raise RunFolderError(
                f"run {str(folder)!r} has recorded no sampled token; look why: lightningrl rollouts list --run "
                f"{shlex.quote(str(folder))}"
            )
        steps, trained = await run.look.steps(), await find_trained(run, origin.recipe)
        gaps = await recompute(run, folder, origin, places)
    checks = [*judge_gaps(gaps, origin.recipe), *judge_steps(steps, origin.recipe, places), *trained.checks(steps)]
    return Certificate(
        checks=tuple(checks),
        gaps=gaps,
        tokens=tokens,
        recomputed=sum(parts[0].tokens for parts in gaps.values() if parts),
        trained=trained.tokens,
        trained_unique=trained.unique,
        trained_unsampled=trained.unsampled,
    )
