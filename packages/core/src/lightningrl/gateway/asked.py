"""The tool calls that a policy asked for, for whoever saw the tools run and wants to know which call asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lightningrl.gateway.completion import CompletionText, ToolRequest
from lightningrl.gateway.rendering import PolicyRenderer
from lightningrl.store.protocol import StoredCall, ToolCallRecord
from lightningrl.types import ToolCall

__all__ = ["asked_before", "asked_tools"]


def asked_tools(requests: Iterable[ToolRequest], transition_id: str, agent: str | None, answered_at: float) -> Iterator[ToolCallRecord]:
    """One record for each, `started_at` when the agent was told (Unix seconds); what became of it is unknown."""
    for request in requests:
        call = ToolCall(id=request.id, name=request.name, arguments=request.arguments, transition_id=transition_id, agent=agent)
        yield ToolCallRecord(tool_call=call, started_at=answered_at)


def asked_before(calls: Sequence[StoredCall], renderers: Mapping[str, PolicyRenderer]) -> Iterator[ToolCallRecord]:
    """The same of calls that the store kept, read again from their tokens."""
    for call in calls:
        kept = call.transition
        renderer = renderers.get(kept.policy)
        if kept.tool_call_ids and renderer is not None:
            text = CompletionText(
                renderer, kept.prompt_ids.tolist(), allow_tools=True, stop=kept.sampling.stop, tool_call_ids=kept.tool_call_ids
            )
            text.push(kept.completion_ids.tolist(), kept.logprobs.tolist(), stream=False)
            requests = text.finish(kept.finish_reason)[0].tool_calls[: len(kept.tool_call_ids)]
            yield from asked_tools(requests, kept.id, kept.agent, kept.started_at + kept.duration_s)
