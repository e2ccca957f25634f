"""Structured output through the real clients: each format and forced tool is kept to, recorded, certified, learned."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from sizes import PATIENCE_S

import lightningrl
from lightningrl.types import FinishReason, SamplingSettings, Transition
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.testing import make_model, make_tokenizer

jsonschema: Any = import_module("jsonschema")
pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "agents" / "structured.md"
USER: Any = {"role": "user", "content": "Which?"}


class Pet(pydantic.BaseModel):
    """Structured output."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    ages: list[Literal[1, 2]]


SCHEMA: Any = Pet.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "feed", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wash", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    """A server with a tiny random policy, which says nothing of its own accord that fits anything."""
    tokenizer = tiny_tokenizer()
    engine = TorchEngine(
        make_model(vocab_size=272, eos_token_id=2, max_position_embeddings=2048),
        policy="policy",
        context_length=2048,
        stop_token_ids=[2],
        text_of=lambda ids: str(tokenizer.decode(list(ids))),
        tokenizer=tokenizer.backend_tokenizer.to_str,
    )
    async with (
        live_gateway(tmp_path, attach=False, renderer=PolicyRenderer(tokenizer)) as running,
        EngineLink(engine, running.url, running.run_key),
    ):
        yield running
    engine.close()


@pytest.fixture
async def attempt(gateway: LiveGateway) -> LiveAttempt:
    return await gateway.attempt(sampling=SamplingSettings(max_tokens=400))


@pytest.fixture
async def chat(attempt: LiveAttempt) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(attempt: LiveAttempt) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = attempt.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=attempt.key, max_retries=0) as client:
        yield client


async def only(attempt: LiveAttempt) -> Transition:
    (call,) = await attempt.transitions()
    return call


@pytest.mark.parametrize("stream", [False, True])
async def test_each_dialects_format_is_kept_to(
    attempt: LiveAttempt, chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    if stream:
        async with chat.chat.completions.stream(model="m", messages=[USER], response_format=Pet) as events:
            said = (await events.get_final_completion()).choices[0].message.parsed
        async with chat.responses.stream(model="m", input="Which?", text_format=Pet) as events:
            also: Any = (await events.get_final_response()).output_parsed
        async with claude.messages.stream(model="m", max_tokens=300, messages=[USER], output_format=Pet) as events:
            third: Any = (await events.get_final_message()).parsed_output
    else:
        completion = await chat.chat.completions.create(model="m", messages=[USER], response_format=FORMAT, n=3)
        for choice in completion.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
            assert choice.finish_reason == "stop"
        said = Pet.model_validate_json(completion.choices[0].message.content or "")
        also = (await chat.responses.parse(model="m", input="Which?", text_format=Pet)).output_parsed
        third = (
            await claude.messages.parse(model="m", max_tokens=300, messages=[USER], output_format=Pet)
        ).parsed_output
    assert all(isinstance(one, Pet) for one in (said, also, third))
    for call in await attempt.transitions():
        assert call.sampling.grammar.startswith("start: ")
        assert 0 < call.chosen.sum() < len(call.completion_ids)
        assert (call.logprobs[~call.chosen] == 0.0).all() and (call.logprobs[call.chosen] < 0.0).all()


async def test_a_json_object_is_one(chat: openai.AsyncOpenAI) -> None:
    completion = await chat.chat.completions.create(
        model="m", messages=[USER], response_format={"type": "json_object"}, max_tokens=300, seed=3
    )
    choice = completion.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").startswith("{")


async def test_a_bound_of_tokens_within_the_grammar_leaves_the_text_as_it_is(
    attempt: LiveAttempt, chat: openai.AsyncOpenAI
) -> None:
    completion = await chat.chat.completions.create(
        model="m",
        messages=[USER],
        response_format=FORMAT,
        max_tokens=8,
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content == '{"kind":'[:8].rstrip()
    assert (await only(attempt)).finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_an_answer_within_its_grammar(chat: openai.AsyncOpenAI) -> None:
    completion = await chat.chat.completions.create(
        model="m",
        messages=[USER],
        response_format=FORMAT,
        stop=["kind"],
    )
    assert (completion.choices[0].finish_reason, completion.choices[0].message.content) == ("stop", '{"')


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tools_have_arguments_that_fit(
    chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    named: Any = {"type": "function", "function": {"name": "feed"}}
    for choice in (named, "required"):
        request: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
        if stream:
            async with chat.chat.completions.stream(**request, parallel_tool_calls=False) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            message = (await chat.chat.completions.create(**request, parallel_tool_calls=False)).choices[0].message
        (call,) = message.tool_calls
        fits(call.function.name, json.loads(call.function.arguments))
        assert choice == "required" or call.function.name == "feed"
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    answer = await claude.messages.create(
        model="m", max_tokens=300, messages=[USER], tools=tools, tool_choice={"type": "tool", "name": "feed"}
    )
    (block,) = answer.content
    assert block.type == "tool_use"
    fits(block.name, block.input)


async def test_parallel_calls_all_fit(chat: openai.AsyncOpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS, "tool_choice": "required", "n": 12}
    completion = await chat.chat.completions.create(**request)
    counts = []
    for choice in completion.choices:
        calls: Any = choice.message.tool_calls or ()
        counts.append(len(calls))
        for call in calls:
            fits(call.function.name, json.loads(call.function.arguments))
        assert choice.finish_reason in ("tool_calls", "length") and (calls or choice.finish_reason == "length")
    assert max(counts) > 1, "nothing but the grammar decides how many there are"


def fits(name: str, arguments: Any) -> None:
    assert name in ("feed", "wash")
    jsonschema.validate(arguments, SCHEMA if name == "feed" else {"type": "object", "maxProperties": 0})


async def test_with_tools_beside_a_format_the_answer_is_one_or_the_other(chat: openai.AsyncOpenAI) -> None:
    completion = await chat.chat.completions.create(
        model="m",
        messages=[USER],
        tools=TOOLS,
        response_format=FORMAT,
        n=32,
        seed=5,
        extra_body={"parallel_tool_calls": False},
    )
    kinds = set()
    for choice in completion.choices:
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            fits(call.function.name, json.loads(call.function.arguments))
        content = choice.message.content or ""
        if not choice.message.tool_calls and choice.finish_reason == "stop":
            jsonschema.validate(json.loads(content), SCHEMA)
        kinds.add(choice.finish_reason)
    assert kinds >= {"stop", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_beyond_the_library_is_refused_by_its_keyword_and_nothing_is_sampled(
    attempt: LiveAttempt, chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        await chat.chat.completions.create(
            model="m",
            messages=[USER],
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            stream=stream,
        )
    assert caught.value.param == "response_format" and "\n" not in caught.value.message
    tools: Any = [{"name": "f", "input_schema": {"type": "object", "properties": {"s": {"not": {}}}}}]
    with pytest.raises(anthropic.BadRequestError, match=r'tools: .*"not"'):
        await claude.messages.create(model="m", max_tokens=9, messages=[USER], tools=tools, tool_choice={"type": "any"})
    assert not await attempt.transitions()


async def test_the_page_on_structured_output_runs(attempt: LiveAttempt) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "OPENAI_BASE_URL": attempt.base_url, "OPENAI_API_KEY": attempt.key}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0 and re.match(r"grade='(right|wrong)' points=[012]", said.decode()), said.decode()


PROJECT = """
from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def answer(question):
    client = OpenAI(api_key="any")
    completion = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}},
    )
    return completion.choices[0].message.content


def tasks():
    return [{"id": f"t{number}", "input": f"which {number}"} for number in range(4)]


def is_dog(task, output, trajectory):
    return float(output == '{"kind": "dog"}')
"""


def test_a_bound_policy_learns_the_value_of_a_field_and_certifies(tmp_path: Path) -> None:
    """One token of each answer is a decision; only that one is trained."""
    tokenizer = make_tokenizer(context_length=256)
    tokenizer.save_pretrained(tmp_path / "policy")
    make_model(max_position_embeddings=256).save_pretrained(tmp_path / "policy")
    (tmp_path / "pets.py").write_text(PROJECT, encoding="utf-8")
    recipe = lightningrl.Recipe.model_validate(
        {
            "agent": "pets.py:answer",
            "folder": tmp_path,
            "tasks": {"train": "pets.py:tasks"},
            "policy": {"model": str(tmp_path / "policy")},
            "rewards": {"dog": {"use": "pets.py:is_dog"}},
            "sampling": {"max_tokens": 60},
            "loop": {"steps": 8, "tasks_per_step": 4, "group_size": 4, "checkpoint_every": 1},
            "runtime": {"workers": 1, "concurrency": 4},
            "learner": {"learning_rate": 1e-2},
        }
    )
    run = lightningrl.train(recipe, run=tmp_path / "run")
    found = run.certify()
    assert found.is_passed, [check for check in found.checks if check.is_passed is False]
    assert found.gaps["policy"][0].largest < 1e-4
    assert found.tokens == 8 * 16, "of each answer one token, 'c' or 'd', was chosen"
    assert found.trained == found.trained_unique > 0 and found.trained_unsampled == 0
    rewards = [step["reward"] for step in run.metrics]
    assert rewards[0] < 0.9 and rewards[-1] == 1.0, rewards
