"""A forced tool call is kept to its tool's schema in every markup that writes calls as JSON: a policy of random weights
says nothing of its own accord that fits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import openai
import pytest
from model_families import FAMILIES, Family, build_tokenizer

from lightningrl.types import SamplingSettings
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.rendering.grammars import call_grammar
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.testing import make_model

jsonschema: Any = import_module("jsonschema")
pytestmark = pytest.mark.slow
SCHEMA: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ages": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
NONE: Any = {"type": "object", "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("feed", SCHEMA), ("wash", NONE))
]
USER: Any = {"role": "user", "content": "Which?"}
BOUND = [
    family
    for family in FAMILIES
    if family.name in ("granite3", "mistral-v3", "mistral-v11", "llama3.1", "phi4-mini", "phi4-functools")
]
REFUSED = [family for family in FAMILIES if family.name in ("llama4", "deepseek-v3", "kimi-k2", "gpt-oss")]


def renderer_of(family: Family) -> PolicyRenderer:
    return PolicyRenderer(build_tokenizer(family), name="policy")


@pytest.fixture
async def attempt(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LiveAttempt]:
    renderer = renderer_of(request.param)
    tokenizer = renderer.tokenizer
    engine = TorchEngine(
        make_model(vocab_size=len(build_tokenizer(request.param)), max_position_embeddings=2048),
        policy="policy",
        context_length=2048,
        stop_token_ids=renderer.stop_token_ids,
        text_of=lambda ids: str(tokenizer.decode(list(ids))),
        tokenizer=lambda: str(build_tokenizer(request.param).backend_tokenizer.to_str()),
    )
    async with (
        live_gateway(tmp_path, attach=False, renderer=renderer) as running,
        EngineLink(engine, running.url, running.run_key),
    ):
        yield await running.attempt(sampling=SamplingSettings(max_tokens=600))
    await asyncio.to_thread(engine.close)


def fits(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, {"feed": SCHEMA, "wash": NONE}[call.function.name])


@pytest.mark.parametrize("attempt", BOUND, indirect=True, ids=lambda family: family.name)
async def test_a_forced_call_of_every_json_markup_fits_its_schema(attempt: LiveAttempt) -> None:
    named: Any = {"type": "function", "function": {"name": "feed"}}
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        for choice in (named, "required"):
            request: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
            answer = await client.chat.completions.create(**request, parallel_tool_calls=False, seed=3)
            message = answer.choices[0].message
            calls: Any = message.tool_calls
            (call,) = calls
            fits(call)
            assert choice == "required" or call.function.name == "feed"
            assert not message.content
        events = client.chat.completions.stream(**request, parallel_tool_calls=False, seed=3)
        async with events as stream:
            streamed: Any = (await stream.get_final_completion()).choices[0].message.tool_calls
        assert [one.function.arguments for one in streamed] == [call.function.arguments]
        several = await client.chat.completions.create(**request, n=6, seed=5)
        for one in several.choices:
            for each in one.message.tool_calls or ():
                fits(each)
    for transition in await attempt.transitions():
        assert transition.sampling.grammar.startswith("start: ")


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_call_of_another_markup_is_not_begun(family: Family) -> None:
    """The gateway then refuses the request, and says why."""
    renderer = renderer_of(family)
    prompt = renderer.render([USER], TOOLS)
    assert renderer.open_call(prompt, None) is renderer.open_call(prompt, "feed") is None
    assert call_grammar(renderer, prompt, TOOLS, None) is None


@pytest.mark.parametrize("family", BOUND, ids=lambda family: family.name)
def test_the_beginning_of_a_call_is_found_again_and_no_user_writes_one(family: Family) -> None:
    renderer = renderer_of(family)
    for name in (None, "feed", "x" * 100):
        empty = renderer.render([USER], TOOLS)
        opening = renderer.open_call(empty, name)
        assert opening is not None
        assert renderer.split_opening((*empty, *opening)) == (empty, opening)
        said: Any = {"role": "user", "content": renderer.decode(opening)}
        forged = renderer.render([said], TOOLS)
        assert renderer.split_opening(forged) == (forged, ())
