"""Evaluations in an agent's own telemetry: `gen_ai.evaluation.result`, as a span's event, a span, or a log record.

attributes of the event ─► name, score ─┐
gen_ai.response.id, spans around it ────┴► Evaluation ─► `server.telemetry_routes` finds the call
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl import conventions
from lightningrl.sanitize import clean_text
from lightningrl_server.spans.tool_spans import SeenSpan

__all__ = ["Evaluation", "read_evaluations", "read_log_evaluations"]

LONGEST_NAME: Final = 200
MOST: Final = 1000
"""Evaluations in one export."""
GREATEST: Final = 1e9
"""Largest score, the same as a reported reward's."""
LONGEST_PATH: Final = 64
"""Spans walked up at most in search of a call's own."""
LABELS: Final[Mapping[str, float]] = {
    "pass": 1.0,
    "correct": 1.0,
    "relevant": 1.0,
    "fail": 0.0,
    "incorrect": 0.0,
    "not_relevant": 0.0,
}
"""Examples of the convention, for evaluations without a value; another label alone says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One score, and what leads to the call that it is of."""

    name: str
    score: float
    answer_id: str | None
    """The answer that was evaluated; None = not said."""
    span_ids: tuple[str, ...]
    """The span that tells it, then those around it, as far as the export holds them."""
    tool_call_ids: tuple[str, ...]
    """Ids of the calls of those spans that are a tool's."""


def read_evaluations(spans: Sequence[SeenSpan]) -> list[Evaluation]:
    """The evaluations in the order of the spans; without what has no name, or no score that may be a reward."""
    by_id = {span.span_id: span for span in spans}
    evaluations: list[Evaluation | None] = []
    for span in spans:
        results = [attributes for name, attributes in span.events if name == conventions.EVALUATION_RESULT]
        if conventions.EVALUATION_NAME in span.attributes:
            results.append(span.attributes)
        if results:
            around = _around(span, by_id)
            tool_call_ids = [by_id[span_id].reading.tool_call_id for span_id in around if span_id in by_id]
            evaluations.extend(_read(attributes, around, tool_call_ids) for attributes in results)
    return [evaluation for evaluation in evaluations if evaluation is not None][:MOST]


def read_log_evaluations(records: Iterable[tuple[str | None, Mapping[str, Any]]]) -> list[Evaluation]:
    """The evaluations of log records, like `read_evaluations`; of the spans around, a record has the current one.
    `records`: that span's id, None = there was none, and attributes."""
    evaluations = [_read(attributes, [span_id] if span_id else [], []) for span_id, attributes in records]
    return [evaluation for evaluation in evaluations if evaluation is not None][:MOST]


def _read(attributes: Mapping[str, Any], span_ids: Sequence[str], tool_call_ids: Sequence[str]) -> Evaluation | None:
    name, score = clean_text(str(attributes.get(conventions.EVALUATION_NAME) or "")), _score(attributes)
    if not name or len(name) > LONGEST_NAME or score is None:
        return None
    answer_id = str(attributes.get(conventions.RESPONSE_ID) or "") or None
    return Evaluation(
        name=name, score=score, answer_id=answer_id, span_ids=tuple(span_ids), tool_call_ids=tuple(tool_call_ids)
    )


def _around(span: SeenSpan, by_id: Mapping[str, SeenSpan]) -> list[str]:
    path = [span.span_id]
    above = span.parent_span_id
    while above is not None and above not in path and len(path) < LONGEST_PATH:
        path.append(above)
        above = by_id[above].parent_span_id if above in by_id else None
    return path


def _score(attributes: Mapping[str, Any]) -> float | None:
    value = attributes.get(conventions.EVALUATION_SCORE_VALUE)
    if value is None:
        return LABELS.get(str(attributes.get(conventions.EVALUATION_SCORE_LABEL) or "").lower())
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if abs(score) <= GREATEST else None  # NaN is not
