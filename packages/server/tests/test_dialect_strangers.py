"""Request bodies as other frameworks send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from lightningrl.types import SamplingSettings
from lightningrl_testing.live_gateway import LiveGateway, live_gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


async def test_penalties_are_the_runs_to_decide_as_temperature_is(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        await client.chat.completions.create(
            model="gpt-4o-mini",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            extra_body={"repetition_penalty": 1.05, "top_k": 20},  # Qwen-Agent
        )
    (transition,) = await attempt.transitions()
    assert (transition.sampling.temperature, transition.sampling.top_k) == (
        SamplingSettings().temperature,
        SamplingSettings().top_k,
    )
