"""A `tool_choice` that asks for a tool call: its first tokens are written for the policy, in the prompt; what is
sampled is recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pydantic
import pytest
from openai import AsyncOpenAI
from sizes import PATIENCE_S
from starlette.applications import Starlette

from lightningrl.types import FinishReason, TrajectoryGroup, Transition
from lightningrl_credit.samples import build_samples
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.groups import make_trajectory
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.slow
NAMED = '<tool_call>\n{"name": "search", "arguments":'
ANY = "<tool_call>\n"
PATHS = ("chat/completions", "responses", "messages")
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}


@pytest.fixture(params=["auto", "qwen3"])
async def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path, renderer=PolicyRenderer(tiny_tokenizer(), request.param)) as running:
        yield running


class Agent:
    """One conversation in one dialect, over plain HTTP."""

    def __init__(
        self, attempt: LiveAttempt, path: str, *, tools: tuple[str, ...] = ("search", "lookup"), stream: bool = False
    ) -> None:
        self.attempt, self.path, self.tools, self.stream = attempt, path, tools, stream
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "What is 6*7?"}]

    async def ask(self, choice: str | None = None, **more: Any) -> dict[str, Any]:
        """`choice`: "any", the name of a tool, or None."""
        answer = await self.post(**self.body(choice), **more)
        assert answer.status_code == 200, answer.text
        said = self.last_event(answer.text) if self.stream else answer.json()
        self.remember(said)
        return said

    async def post(self, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return await client.post(
                f"{self.attempt.base_url}/{self.path}", json=body, headers={"x-api-key": self.attempt.key}
            )

    def body(self, choice: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "stream": self.stream}
        if self.path == "chat/completions":
            body |= {"messages": self.history}
            tools: list[Any] = [
                {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in self.tools
            ]
            forced: Any = "required" if choice == "any" else {"type": "function", "function": {"name": choice}}
        elif self.path == "responses":
            body |= {"input": self.history}
            tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in self.tools]
            forced = "required" if choice == "any" else {"type": "function", "name": choice}
        else:
            body |= {"messages": self.history, "max_tokens": 500}
            tools = [{"name": name, "input_schema": PARAMETERS} for name in self.tools]
            forced = {"type": "any"} if choice == "any" else {"type": "tool", "name": choice}
        return body | ({"tools": tools} if tools else {}) | ({"tool_choice": forced} if choice else {})

    def last_event(self, text: str) -> dict[str, Any]:
        """A streamed answer, put together."""
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        if self.path == "responses":
            return dict(events[-1]["response"])
        if self.path == "messages":
            blocks: list[dict[str, Any]] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append(event["content_block"])
                elif event["type"] == "content_block_delta":
                    delta = event["delta"]
                    if "partial_json" in delta:
                        blocks[-1]["input"] = json.loads(delta["partial_json"])
                    else:
                        blocks[-1]["text"] += delta["text"]
            last = next(event for event in events if event["type"] == "message_delta")
            return {"content": blocks, "stop_reason": last["delta"]["stop_reason"]}
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for event in events:
            for choice in event["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                message["tool_calls"] = message.get("tool_calls", []) + choice["delta"].get("tool_calls", [])
        if not message["tool_calls"]:
            del message["tool_calls"]
        return {"choices": [{"message": message, "finish_reason": events[-1]["choices"][0]["finish_reason"]}]}

    def remember(self, said: dict[str, Any]) -> None:
        """Send the answer and a result of each call back, as SDKs do."""
        calls = [call for _, _, call in self.calls(said)]
        if self.path == "chat/completions":
            self.history += [
                said["choices"][0]["message"],
                *({"role": "tool", "tool_call_id": call, "content": "42"} for call in calls),
            ]
        elif self.path == "responses":
            self.history += [
                *said["output"],
                *({"type": "function_call_output", "call_id": call, "output": "42"} for call in calls),
            ]
        else:
            results = [{"type": "tool_result", "tool_use_id": call, "content": "42"} for call in calls]
            self.history += [
                {"role": "assistant", "content": said["content"]},
                *([{"role": "user", "content": results}] if results else []),
            ]
        if not calls:
            self.history.append({"role": "user", "content": "Sure?"})

    def calls(self, said: dict[str, Any]) -> list[tuple[str, Any, str]]:
        """Name, arguments and id of each tool call."""
        if self.path == "chat/completions":
            asked = said["choices"][0]["message"].get("tool_calls") or []
            return [(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"]) for call in asked]
        if self.path == "responses":
            asked = [item for item in said["output"] if item["type"] == "function_call"]
            return [(call["name"], json.loads(call["arguments"]), call["call_id"]) for call in asked]
        return [
            (block["name"], block["input"], block["id"]) for block in said["content"] if block["type"] == "tool_use"
        ]

    def text(self, said: dict[str, Any]) -> str:
        if self.path == "chat/completions":
            return said["choices"][0]["message"]["content"] or ""
        items = (
            [part for item in said["output"] for part in item.get("content", [])]
            if self.path == "responses"
            else said["content"]
        )
        return "".join(part.get("text", "") for part in items)

    def end(self, said: dict[str, Any]) -> str:
        if self.path == "chat/completions":
            return str(said["choices"][0]["finish_reason"])
        return str(said["status"] if self.path == "responses" else said["stop_reason"])


def assert_exact(engine: ScriptedEngine, transition: Transition) -> None:
    emission = engine.emissions[transition.id]
    assert tuple(transition.prompt_ids.tolist()) == emission.request.prompt_ids
    assert tuple(transition.completion_ids.tolist()) == emission.token_ids
    assert tuple(transition.logprobs.tolist()) == emission.logprobs


def prompt_of(gateway: LiveGateway, transition: Transition) -> str:
    return str(gateway.engine.tokenizer.decode(transition.prompt_ids.tolist()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_forced_call_begins_in_the_prompt_and_the_history_extends_it(
    gateway: LiveGateway, path: str, stream: bool
) -> None:
    gateway.engine.enqueue(
        ' {"q": "ü"}}\n</tool_call>', '{"name": "lookup", "arguments": {}}\n</tool_call>', "It is 42."
    )
    agent = Agent(await gateway.attempt(), path, stream=stream)
    named = await agent.ask("search")
    chosen = await agent.ask("any")
    free = await agent.ask()
    assert [agent.calls(said)[0][:2] for said in (named, chosen)] == [("search", {"q": "ü"}), ("lookup", {})]
    assert [agent.text(said) for said in (named, chosen, free)] == ["", "", "It is 42."]
    assert (
        agent.end(named) == {"chat/completions": "tool_calls", "responses": "completed", "messages": "tool_use"}[path]
    )
    transitions = await agent.attempt.transitions()
    for transition, opening in zip(transitions, (NAMED, ANY, ""), strict=True):
        assert_exact(gateway.engine, transition)
        assert prompt_of(gateway, transition).endswith("<|im_start|>assistant\n" + opening)
    for parent, child in pairwise(transitions):
        past = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
        assert child.prompt_ids.tolist()[: len(past)] == past
        assert child.parent_id == parent.id and not child.is_break
    assert [len(transition.tool_call_ids) for transition in transitions] == [1, 1, 0]
    first = prompt_of(gateway, transitions[1])
    assert (
        NAMED
        + ' {"q": "ü"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n'
        in first
    )


@pytest.mark.parametrize("path", PATHS)
async def test_the_only_tool_offered_is_the_one_that_is_forced(gateway: LiveGateway, path: str) -> None:
    gateway.engine.enqueue(' {"q": "x"}}\n</tool_call>')
    agent = Agent(await gateway.attempt(), path, tools=("search",))
    assert agent.calls(await agent.ask("any"))[0][:2] == ("search", {"q": "x"})
    (transition,) = await agent.attempt.transitions()
    assert prompt_of(gateway, transition).endswith(NAMED)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_still_no_call_is_text_and_no_call_is_invented(
    gateway: LiveGateway, path: str, stream: bool
) -> None:
    gateway.engine.enqueue(" I would rather not.", "not json\n</tool_call>", "Yes.")
    agent = Agent(await gateway.attempt(), path, stream=stream)
    refused, broken, free = await agent.ask("search"), await agent.ask("any"), await agent.ask()
    assert [agent.calls(said) for said in (refused, broken, free)] == [[], [], []]
    assert agent.text(refused) == NAMED + " I would rather not."
    assert agent.text(broken) == ANY + "not json\n</tool_call>"
    assert agent.end(refused) == {"chat/completions": "stop", "responses": "completed", "messages": "end_turn"}[path]
    transitions = await agent.attempt.transitions()
    assert [transition.tool_call_ids for transition in transitions] == [(), (), ()]
    assert [transition.parent_id for transition in transitions] == [None, transitions[0].id, transitions[1].id]
    assert not any(transition.is_break for transition in transitions)
    for transition in transitions:
        assert_exact(gateway.engine, transition)


@pytest.mark.parametrize("path", PATHS)
async def test_a_forced_call_that_was_cut_says_so(gateway: LiveGateway, path: str) -> None:
    gateway.engine.enqueue(' {"q": "a long question"}}\n</tool_call>')
    agent = Agent(await gateway.attempt(), path)
    bound = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = await agent.post(**{**agent.body("search"), bound: 6})
    assert agent.calls(answer.json()) == []
    assert agent.text(answer.json()) == NAMED + ' {"q":'
    assert (
        agent.end(answer.json())
        == {"chat/completions": "length", "responses": "incomplete", "messages": "max_tokens"}[path]
    )
    (transition,) = await agent.attempt.transitions()
    assert transition.finish_reason is FinishReason.LENGTH and len(transition.completion_ids) == 6


async def test_logprobs_and_usage_are_of_what_was_sampled(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(' {"q": "x"}}\n</tool_call>')
    agent = Agent(await gateway.attempt(), "chat/completions")
    said = await agent.ask("search", logprobs=True)
    (transition,) = await agent.attempt.transitions()
    assert [entry["logprob"] for entry in said["choices"][0]["logprobs"]["content"]] == transition.logprobs.tolist()
    assert said["usage"]["prompt_tokens"] == len(transition.prompt_ids)
    assert said["usage"]["completion_tokens"] == len(transition.completion_ids)


async def test_what_was_written_for_the_policy_is_never_trained(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(' {"q": "x"}}\n</tool_call>', "It is 42.")
    agent = Agent(await gateway.attempt(), "chat/completions")
    await agent.ask("search")
    await agent.ask()
    transitions = await agent.attempt.transitions()
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("r", transitions),))
    credit = (tuple(np.ones(len(transition.completion_ids), dtype=np.float32) for transition in transitions),)
    (row,) = build_samples([group], [credit], rows="merged")
    assert (
        gateway.engine.tokenizer.decode(row.token_ids[row.mask].tolist())
        == ' {"q": "x"}}\n</tool_call><|im_end|>It is 42.<|im_end|>'
    )


async def test_several_choices_begin_alike_and_end_as_they_will(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(' {"q": "a"}}\n</tool_call>', " no", ' {"q": "c"}}\n</tool_call>')
    agent = Agent(await gateway.attempt(), "chat/completions")
    answer = (await agent.post(**agent.body("search"), n=3)).json()
    assert sorted(choice["finish_reason"] for choice in answer["choices"]) == ["stop", "tool_calls", "tool_calls"]
    for transition in await agent.attempt.transitions():
        assert_exact(gateway.engine, transition)


async def test_a_retry_after_a_restart_is_given_the_same_call(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(' {"q": "x"}}\n</tool_call>')
    agent = Agent(await gateway.attempt(), "messages")
    body = {**agent.body("search"), "stream": False}
    path = agent.attempt.base_url.removeprefix(gateway.url) + "/messages"
    answers: list[Any] = []
    for _ in range(2):
        fresh = create_gateway(gateway.store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)})
        transport = httpx.ASGITransport(app=Starlette(routes=fresh.routes))
        headers = {
            "x-api-key": agent.attempt.key,
            "x-lightningrl-call-id": "c1",
            "x-stainless-retry-count": str(len(answers)),
        }
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
            answers.append((await client.post(path, json=body)).json()["content"])
    assert answers[0] == answers[1]
    assert answers[0][0]["input"] == {"q": "x"}
    assert len(await agent.attempt.transitions()) == 1


async def test_count_tokens_counts_what_is_written_for_the_policy(gateway: LiveGateway) -> None:
    agent = Agent(await gateway.attempt(), "messages/count_tokens")
    counted = (await agent.post(**agent.body("search"))).json()["input_tokens"]
    agent.path = "messages"
    said = await agent.ask("search")
    assert counted == said["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "tools", "choice", "sentence"),
    [
        (
            "chat/completions",
            (),
            "required",
            "asks for a tool call, but no tools are offered; send tools, or leave it out",
        ),
        ("responses", (), "required", "asks for a tool call, but no tools are offered"),
        ("messages", (), {"type": "any"}, "asks for a tool call, but no tools are offered"),
        (
            "chat/completions",
            ("a", "b"),
            {"type": "function", "function": {"name": "c"}},
            "'c', which is not offered; offered: a, b",
        ),
        ("responses", ("a", "b"), {"type": "function", "name": "c"}, "'c', which is not offered; offered: a, b"),
        ("messages", ("a", "b"), {"type": "tool", "name": "c"}, "'c', which is not offered; offered: a, b"),
        (
            "chat/completions",
            ("a",),
            {"type": "allowed_tools", "mode": "auto"},
            "is not supported; use 'auto', 'none', 'required' or",
        ),
        (
            "responses",
            ("a",),
            {"type": "web_search"},
            "is not supported; use 'auto', 'none', 'required' or a function by its name",
        ),
        ("chat/completions", ("a",), {"type": "function", "function": {"name": 5}}, "is not supported; use"),
        ("responses", ("a",), {"type": "function"}, "is not supported; use"),
        ("messages", ("a",), {"type": "tool"}, "is not supported; use 'auto', 'none', 'any', or 'tool' with its name"),
        ("chat/completions", ("a",), "always", "tool_choice 'always' is not supported"),
    ],
)
async def test_a_choice_that_cannot_be_made_is_told(
    gateway: LiveGateway, path: str, tools: tuple[str, ...], choice: Any, sentence: str
) -> None:
    agent = Agent(await gateway.attempt(), path, tools=tools)
    answer = await agent.post(**agent.body(None), tool_choice=choice)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert await agent.attempt.transitions() == ()


@pytest.mark.parametrize(
    "template",
    [
        CHATML_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"),
        CHATML_TEMPLATE.replace("'<tool_call>\\n{", "'<tool_call>\\n<function={"),
    ],
    ids=["reasoning is open", "other markup"],
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_policy_whose_call_cannot_be_begun_says_so_and_is_free_otherwise(
    tmp_path: Path, path: str, template: str
) -> None:
    assert template != CHATML_TEMPLATE
    async with live_gateway(tmp_path, renderer=PolicyRenderer(tiny_tokenizer(chat_template=template))) as gateway:
        agent = Agent(await gateway.attempt(), path)
        answer = await agent.post(**agent.body("search"))
        assert (
            answer.status_code == 400
            and "a tool call cannot be forced on policy 'policy'" in answer.json()["error"]["message"]
        )
        await agent.ask()
        assert len(await agent.attempt.transitions()) == 1


def test_a_user_who_writes_the_markup_forces_nothing() -> None:
    renderer = PolicyRenderer(tiny_tokenizer())
    prompt = renderer.render([{"role": "user", "content": NAMED}], None)
    assert renderer.split_opening(prompt) == (prompt, ())
    opening = renderer.open_call(prompt, "x" * 128)
    assert opening is not None
    assert renderer.split_opening((*prompt, *opening)) == (prompt, opening)


class Verdict(pydantic.BaseModel):
    answer: int
    sure: bool


async def test_a_pydantic_ai_agent_with_an_output_type_is_recorded_unchanged(gateway: LiveGateway) -> None:
    from pydantic_ai import Agent as PydanticAgent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    gateway.engine.enqueue(' {"answer": "no number"}}\n</tool_call>', ' {"answer": 42, "sure": true}}\n</tool_call>')
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        model = OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client))
        result = await PydanticAgent(model, output_type=Verdict).run("What is 6*7?")
    assert result.output == Verdict(answer=42, sure=True)
    first, second = await attempt.transitions()
    assert second.parent_id == first.id and not second.is_break
    for transition in (first, second):
        assert_exact(gateway.engine, transition)
        assert prompt_of(gateway, transition).endswith('<tool_call>\n{"name": "final_result", "arguments":')


async def test_a_langchain_model_with_structured_output_by_function_calling_is_too(gateway: LiveGateway) -> None:
    from langchain_openai import ChatOpenAI

    gateway.engine.enqueue(' {"answer": 42, "sure": true}}\n</tool_call>', " I do not know.")
    attempt = await gateway.attempt()
    async with httpx.AsyncClient() as http:
        options: Any = {"base_url": attempt.base_url, "api_key": attempt.key, "http_async_client": http}
        model = ChatOpenAI(model="gpt-4o", **options).with_structured_output(
            Verdict, method="function_calling", include_raw=True
        )
        whole: Any = await model.ainvoke("What is 6*7?")
        none: Any = await model.ainvoke("What is 6*7?")
    assert whole["parsed"] == Verdict(answer=42, sure=True)
    assert none["parsed"] is None and "I do not know." in none["raw"].content
    for transition in await attempt.transitions():
        assert_exact(gateway.engine, transition)
        assert prompt_of(gateway, transition).endswith('<tool_call>\n{"name": "Verdict", "arguments":')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_goes_on_from_a_response_by_its_id(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("Let me see.", ' {"q": "x"}}\n</tool_call>', "It is 42.")
    agent = Agent(await gateway.attempt(), "responses", stream=stream)
    first = await agent.ask()
    agent.history = [{"role": "user", "content": "Look it up."}]
    second = await agent.ask("search", previous_response_id=first["id"])
    agent.history = [{"type": "function_call_output", "call_id": agent.calls(second)[0][2], "output": "42"}]
    await agent.ask(previous_response_id=second["id"])
    transitions = await agent.attempt.transitions()
    for parent, child in pairwise(transitions):
        past = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
        assert child.prompt_ids.tolist()[: len(past)] == past
        assert child.parent_id == parent.id and not child.is_break
    assert prompt_of(gateway, transitions[1]).endswith(NAMED)
