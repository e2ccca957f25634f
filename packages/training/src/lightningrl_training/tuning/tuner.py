"""Updates of a policy from rows, by any trainer backend: score the batch, credit it, take a policy-gradient step.

rows ─► Backend.logprobs ─► credit (`methods`) ─► samples ─► Backend.learn ─► metrics
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.errors import ConfigError
from lightningrl.files import whole_file
from lightningrl_training.tuning import methods
from lightningrl_training.tuning.rows import Row
from lightningrl_training.tuning.settings import TuneSettings

__all__ = ["Tuner", "TuningRow", "arrange", "order_of"]

_AT_ONCE = 256
"""Rows that are scored in one question to the backend."""
_SHOWN = ("grad_norm", "lr", "entropy")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TuningRow:
    """A row with all that is scored of it."""

    row: Row
    scored: tuple[Continuation, ...]
    """Its answers; of kto also another row's, after its prompt."""


def arrange(rows: Sequence[Row], settings: TuneSettings) -> list[TuningRow]:
    """Rows with what is scored of them; of kto also the answer of the row before, among as many as a batch has."""
    arranged: list[TuningRow] = []
    for start in range(0, len(rows), settings.batch):
        part = rows[start : start + settings.batch]
        others = methods.mismatch(part) if settings.method == "kto" else None
        for place, row in enumerate(part):
            extra = () if others is None else (others[place],)
            arranged.append(TuningRow(row=row, scored=(*row.answers, *extra)))
    return arranged


def order_of(count: int, settings: TuneSettings, step: int) -> list[int]:
    """Numbers of the rows of an update, the first of which is 0: each row once an epoch, in an order by the seed."""
    steps = -(-count // settings.batch)
    epoch, place = divmod(step, steps)
    order = list(range(count))
    random.Random(f"{settings.seed}/{epoch}").shuffle(order)  # noqa: S311 - order, not secrets
    return order[place * settings.batch : (place + 1) * settings.batch]


class Tuner:
    """Takes updates of a backend's policy. Raises ConfigError where the backend cannot score what the method needs."""

    def __init__(self, backend: Backend, settings: TuneSettings, *, policy: str) -> None:
        self._backend = backend
        self._settings = settings
        self._policy = policy
        if not isinstance(backend, TokenScorer):
            raise ConfigError(
                f"tune.method {settings.method!r} scores tokens, which this backend does not; use 'torch'"
            )
        self._scorer = backend

    def score(self, rows: Sequence[TuningRow]) -> NDArray[np.float64]:
        """Σ log π of each row's scored texts, (rows, texts), by the weights of now."""
        texts = [text for row in rows for text in row.scored]
        sums: list[float] = []
        for start in range(0, len(texts), _AT_ONCE):
            logprobs_of = self._scorer.logprobs(texts[start : start + _AT_ONCE])
            sums += [float(np.sum(logprobs, dtype=np.float64)) for logprobs in logprobs_of]
        return np.array(sums, np.float64).reshape(len(rows), -1)

    def keep_reference(self, rows: Sequence[TuningRow], path: Path) -> NDArray[np.float64] | None:
        """Scores of the starting policy, from `path` where they were kept there before; None = the method needs
        none."""
        if self._settings.method == "sft":
            return None
        if not path.is_file():
            with whole_file(path) as scratch, scratch.open("wb") as file:
                np.save(file, self.score(rows))
        scores: NDArray[np.float64] = np.load(path)
        return scores

    def update(self, rows: Sequence[TuningRow], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Take one update. `reference`: the starting policy's scores of these rows. Returns metrics."""
        credit = self._credit(rows, reference)
        answers = [answer for row in rows for answer in row.row.answers]
        version = self._backend.engine.info.version
        samples = [
            methods.make_sample(answer, advantage, weight, policy=self._policy, version=version)
            for answer, advantage, weight in zip(answers, credit.advantages, credit.weights, strict=True)
        ]
        report = self._backend.learn(samples)
        metrics = {f"learn/{name}": report.metrics[name] for name in _SHOWN if name in report.metrics}
        metrics["learn/loss"] = report.metrics.get("loss", 0.0) if credit.loss is None else credit.loss
        if credit.accuracy is not None:
            metrics["learn/accuracy"] = credit.accuracy
        return {**metrics, "tokens": float(report.tokens)}

    def validate(self, rows: Sequence[TuningRow], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """The method's loss of held-out rows."""
        if reference is None:
            tokens = sum(len(answer.tokens) for row in rows for answer in row.row.answers)
            return {"validation/loss": -float(self.score(rows).sum()) / tokens}
        credit = self._credit(rows, reference)
        metrics = {"validation/loss": credit.loss or 0.0}
        return metrics if credit.accuracy is None else {**metrics, "validation/accuracy": credit.accuracy}

    def _credit(self, rows: Sequence[TuningRow], reference: NDArray[np.float64] | None) -> methods.Credit:
        if reference is None:
            return methods.credit_sft([row.row for row in rows])
        ratios = self.score(rows) - reference
        if self._settings.method == "dpo":
            return methods.credit_dpo(
                [(float(chosen), float(rejected)) for chosen, rejected in ratios], self._settings.beta
            )
        labels = [row.row.label for row in rows]
        return methods.credit_kto(ratios[:, 0].tolist(), labels, max(0.0, float(ratios[:, 1].mean())), self._settings)
