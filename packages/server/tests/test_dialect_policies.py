"""Several policies in one run: each addressed by its name, in every dialect, with tokens of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}


class Two:
    """A gateway that serves a trained writer and a frozen critic."""

    def __init__(self, live: LiveGateway, client: httpx.AsyncClient, attempt: LiveAttempt) -> None:
        self.live, self.client, self.attempt = live, client, attempt

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        url = self.attempt.base_url.removeprefix(self.live.url) + f"/{path}"
        return await self.client.post(url, json=body, headers={"authorization": f"Bearer {self.attempt.key}"})


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    writer = ScriptedEngine(tiny_tokenizer(), policy="writer", reply=lambda prompt: "draft")
    critic = ScriptedEngine(tiny_tokenizer(words=[" draft"]), policy="critic", version=7, reply=lambda prompt: "good")
    async with live_gateway(tmp_path, engine=writer) as live:
        live.engines.attach(critic)
        renderers = {engine.policy: PolicyRenderer(engine.tokenizer) for engine in (writer, critic)}
        gateway = create_gateway(live.store, live.engines, renderers, GatewaySettings(trainable=frozenset({"writer"})))
        transport = httpx.ASGITransport(app=Starlette(routes=gateway.routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield Two(live, client, await live.attempt())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_each_policy_answers_to_its_name(two: Two, path: str) -> None:
    for model in ("writer", "critic"):
        answer = await two.post(
            path, {"model": model, "messages": [USER], "input": "hi", "max_tokens": 9, "max_output_tokens": 9}
        )
        assert answer.status_code == 200 and answer.json()["model"] == model
    first, second = await two.attempt.transitions()
    assert (first.policy, first.policy_version, first.trainable) == ("writer", 0, True)
    assert (second.policy, second.policy_version, second.trainable) == ("critic", 7, False)
    unknown = await two.post(
        path, {"model": "gpt", "messages": [USER], "input": "hi", "max_tokens": 9, "max_output_tokens": 9}
    )
    assert unknown.status_code == 404
    assert "it serves critic, writer" in unknown.json()["error"]["message"]
    assert "configure [upstream]" in unknown.json()["error"]["message"]


async def test_one_policy_never_goes_on_with_the_tokens_of_another(two: Two) -> None:
    drafted = (await two.post("chat/completions", {"model": "writer", "messages": [USER]})).json()["choices"][0][
        "message"
    ]
    history = [USER, drafted, {"role": "user", "content": "What of this draft?"}]
    await two.post("chat/completions", {"model": "critic", "messages": history})
    await two.post("chat/completions", {"model": "writer", "messages": history})
    first, second, third = await two.attempt.transitions()
    assert second.parent_id is None
    critic = tiny_tokenizer(words=[" draft"])
    assert "What of this draft?" in critic.decode(second.prompt_ids.tolist())
    assert third.parent_id == first.id and not third.is_break


async def test_a_response_of_one_policy_may_be_taken_up_by_another(two: Two) -> None:
    first = (await two.post("responses", {"model": "writer", "input": "hi"})).json()
    second = await two.post(
        "responses", {"model": "critic", "input": "What of it?", "previous_response_id": first["id"]}
    )
    assert second.status_code == 200
    _, taken = await two.attempt.transitions()
    assert taken.parent_id is None
    assert tiny_tokenizer(words=[" draft"]).decode(taken.prompt_ids.tolist()) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ndraft<|im_end|>\n<|im_start|>user\nWhat of it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
