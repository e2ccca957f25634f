"""The tool calls that policies asked for, as the gateway tells them to whoever saw the tools run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.gateway.app import Gateway, create_gateway
from lightningrl.gateway.rendering import PolicyRenderer
from lightningrl.store.errors import UnknownRecord
from lightningrl.testing.live_gateway import LiveAttempt, live_gateway

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("search", "lookup")]
CALLS = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"q": "ü {name}"}}}}\n</tool_call>' for name in ("search", "lookup"))


async def post(attempt: LiveAttempt, **body: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(
            f"{attempt.base_url}/chat/completions",
            json={"model": "m", "messages": [USER], "tools": TOOLS, **body},
            headers={"authorization": f"Bearer {attempt.key}", "x-lightningrl-agent": "writer"},
        )
    calls: list[dict[str, Any]] = answer.json()["choices"][0]["message"].get("tool_calls", [])
    return calls


async def test_each_tool_call_that_was_asked_for_is_told_with_its_transition_also_after_a_restart(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        gateway.engine.enqueue(f"Let me see. {CALLS}", "no tool", CALLS)
        attempt = await gateway.attempt()
        told = await post(attempt) + await post(attempt) + await post(attempt, parallel_tool_calls=False)
        first, _, third = await attempt.transitions()
        renderers = {"policy": PolicyRenderer(gateway.engine.tokenizer)}
        gateways: tuple[Gateway, ...] = (gateway.gateway, create_gateway(gateway.store, gateway.engines, renderers))
        for one in gateways:
            records = await one.asked_tools(attempt.rollout_id, attempt.attempt)
            asked = [record.tool_call for record in records]
            assert [(call.id, call.name, call.arguments) for call in asked] == [
                (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in told
            ]
            assert [call.transition_id for call in asked] == [first.id, first.id, third.id]
            assert {call.agent for call in asked} == {"writer"}
            assert [record.started_at for record in records] == pytest.approx(
                [call.started_at + call.duration_s for call in (first, first, third)]
            )
        assert json.loads(asked[1].arguments) == {"q": "ü lookup"}


async def test_of_an_unknown_attempt_there_is_nothing_to_tell(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        with pytest.raises(UnknownRecord):
            await gateway.gateway.asked_tools("nobody", 1)
