"""Sampling settings that an agent asks for and the recipe decides: counted, in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.types import SamplingSettings
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "max_tokens": 9,
    "max_output_tokens": 9,
}
ASKED: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"temperature": 0, "top_p": 0.5}, {"temperature=0": 1, "top_p=0.5": 1}),
    ({"temperature": 0.7, "top_p": 1}, {}),
    ({"temperature": "hot", "top_p": True}, {}),
    ({"temperature": 10**400}, {}),
    (
        {"min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": -0.5, "top_k": 20},
        {"min_p=0.1": 1, "repetition_penalty=1.05": 1, "presence_penalty=-0.5": 1, "top_k=20": 1},
    ),
    ({"min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": None, "top_k": -1}, {}),
]
PATHS = ["chat/completions", "responses", "messages"]
# what is asked, and what the sentence says
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": ["yes", "no"]}, "guided_choice is not supported: answers are bound to JSON schemas alone"),
    ({"guided_json": {"type": "object"}}, "guided_json is not supported"),
    ({"guided_regex": "a+"}, "guided_regex is not supported"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs is not supported"),
    ({"regex": "a+"}, "regex is not supported"),
    ({"nvext": {"guided_json": {"type": "object"}}}, "guided_json is not supported"),
    ({"extra_body": {"guided_choice": ["a"]}}, "guided_choice is not supported"),
    ({"sampling_params": {"min_tokens": 5, "temperature": 1}}, "min_tokens is not supported"),
    ({"min_tokens": 5}, "min_tokens is not supported"),
    ({"ignore_eos": True}, "ignore_eos is not supported"),
    ({"bad_words": ["x"]}, "bad_words is not supported"),
    ({"chat_template": "{{ messages }}"}, "chat_template is not supported"),
    ({"add_generation_prompt": False}, "add_generation_prompt is not supported"),
    ({"best_of": 3}, "best_of is not supported"),
    ({"stop_token_ids": "x"}, "stop_token_ids is no list of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
]
NOTHING: dict[str, Any] = {
    "guided_json": None,
    "structured_outputs": {},
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "best_of": 1,
    "add_generation_prompt": True,
    "stop_token_ids": [],
    "length_penalty": 1.0,
    "custom": None,
    "nvext": {"guided_json": None, "min_tokens": 0},
    "extra_body": {},
    "sampling_params": None,
    "other": {},
    "user": "me",
}


async def post(attempt: LiveAttempt, path: str, asked: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(
            f"{attempt.base_url}/{path}", json={**BODY, **asked}, headers={"authorization": f"Bearer {attempt.key}"}
        )


@pytest.mark.parametrize("path", PATHS)
async def test_what_servers_of_open_models_take_is_honoured_or_refused_by_name(path: str, tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as live:
        attempt = await live.attempt()
        for asked, sentence in REFUSED:
            answer = await post(attempt, path, asked)
            assert answer.status_code == 400
            assert sentence in answer.json()["error"]["message"]
        assert (await post(attempt, path, {"stop_token_ids": [7, 8.0]})).status_code == 200
        (call,) = await attempt.transitions()
        assert {7, 8} < set(call.sampling.stop_token_ids)


@pytest.mark.parametrize("path", PATHS)
async def test_a_field_that_nobody_reads_is_counted_by_its_name(path: str, tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as live:
        attempt = await live.attempt()
        for asked in (
            NOTHING,
            {"top_logits": 3},
            {"top_logits": 4, "verbosity": "low"},
            {"nvext": {"annotations": ["x"]}},
        ):
            assert (await post(attempt, path, asked)).status_code == 200
        (status,) = live.engines.status()
        counted = {name: count for name, count in status.ignored.items() if name not in BODY}
        assert counted == {"top_logits": 2, "verbosity": 1, "nvext.annotations": 1}
        assert status.overridden == {}


@pytest.mark.parametrize("path", PATHS)
async def test_what_an_agent_asks_for_and_does_not_get_is_counted(path: str, tmp_path: Path) -> None:
    settings = GatewaySettings(sampling={"policy": SamplingSettings(temperature=0.7)})
    for number, (asked, expected) in enumerate(ASKED):
        (tmp_path / str(number)).mkdir()
        async with live_gateway(tmp_path / str(number), settings=settings) as live, httpx.AsyncClient() as client:
            attempt = await live.attempt()
            answer = await client.post(
                f"{attempt.base_url}/{path}", json={**BODY, **asked}, headers={"authorization": f"Bearer {attempt.key}"}
            )
            assert answer.status_code == 200, answer.text
            assert live.engines.status()[0].overridden == expected
            (call,) = await attempt.transitions()
            assert call.sampling.temperature == 0.7, "the recipe decides"


async def test_no_agent_fills_the_server_with_settings(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as live:
        for number in range(1000):
            live.engines.note_overridden("policy", [f"temperature={number}", "top_p=0"])
        (status,) = live.engines.status()
        assert len(status.overridden) <= 32
        assert status.overridden["top_p=0"] == 1000
