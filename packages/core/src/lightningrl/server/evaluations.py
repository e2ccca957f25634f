"""Evaluations become reported rewards: of the call whose answer they name, else of the nearest call around them, else of the rollout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightningrl.dialects import Dialect, call_of
from lightningrl.store.protocol import CallLog
from lightningrl.telemetry.evaluations import Evaluation

__all__ = ["find_rewards"]


async def find_rewards(
    log: CallLog, dialects: Sequence[Dialect], rollout_id: str, attempt: int, evaluations: Sequence[Evaluation]
) -> dict[str | None, dict[str, float | None]]:
    """By transition id, None = of the rollout. Of several of one name and call, the last stands."""
    calls = [record.transition for record in await log.calls(rollout_id, attempt)]
    ids = {call.id for call in calls}
    by_span = {call.span_id: call.id for call in calls if call.span_id is not None}
    by_tool = {tool_call_id: call.id for call in calls for tool_call_id in call.tool_call_ids}
    rewards: dict[str | None, dict[str, float | None]] = defaultdict(dict)
    for evaluation in evaluations:
        transition_id = evaluation.answer_id and call_of(evaluation.answer_id, dialects)
        if transition_id not in ids:
            near = [by_span.get(span_id) for span_id in evaluation.span_ids] + [
                by_tool.get(call_id) for call_id in evaluation.tool_call_ids
            ]
            transition_id = next((found for found in near if found is not None), None)
        rewards[transition_id][evaluation.name] = evaluation.score
    return dict(rewards)
