"""OpenAI responses through the official SDK: what an agent sees, and that the store has exactly what was sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        "strict": False,
    }
    for name in ("search", "lookup")
]
CALLS = '<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
QUESTION = "What is 6*7?"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


def client_of(attempt: LiveAttempt, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, **{"max_retries": 0, **options})


async def ask(client: AsyncOpenAI, stream: bool, **request: Any) -> Any:
    if not stream:
        return await client.responses.create(model="gpt-5", **request)
    async with client.responses.stream(model="gpt-5", **request) as events:
        return await events.get_final_response()


def prompt_of(gateway: LiveGateway, transition: Any) -> str:
    return str(gateway.engine.tokenizer.decode(transition.prompt_ids.tolist()))


def assert_prefix(transitions: Any) -> None:
    for parent, child in pairwise(transitions):
        past = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
        assert child.prompt_ids.tolist()[: len(past)] == past
        assert child.parent_id == parent.id and not child.is_break


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_answer(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("It is 42 — été 🙂.")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(
            client, stream, input=QUESTION, instructions="Be brief.", metadata={"a": "b"}, store=False, temperature=0.1
        )
    (transition,) = await attempt.transitions()
    assert answer.id == f"resp_{transition.id}"
    assert (answer.output_text, answer.status, answer.model) == ("It is 42 — été 🙂.", "completed", "gpt-5")
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief."
    assert answer.usage.input_tokens == len(transition.prompt_ids)
    assert answer.usage.output_tokens == len(transition.completion_ids)
    assert prompt_of(gateway, transition) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert transition.sampling.temperature == 1.0, "the run's temperature stands, the agent's does not"


async def test_events_come_in_the_order_of_the_api(gateway: LiveGateway) -> None:
    text = "Grüße 🙂 aus < der > Stadt."
    gateway.engine.enqueue(f"<think>hm hm</think>{text}\n{CALLS}")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        events: list[Any] = [
            event async for event in await client.responses.create(model="m", input=QUESTION, tools=TOOLS, stream=True)
        ]
    kinds = [event.type.removeprefix("response.") for event in events]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == text and len(pieces) > 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    once = [kind for kind, following in pairwise([*kinds, ""]) if kind != following]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        "created",
        "in_progress",
        *[
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ],
        *[
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ],
        *call,
        *call,
        "completed",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [item.type for item in done] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True], ids=["whole input", "previous_response_id"])
async def test_a_tool_loop_with_parallel_calls_never_breaks(gateway: LiveGateway, stream: bool, by_id: bool) -> None:
    gateway.engine.enqueue(f"<think>hm</think>Let me see.\n{CALLS}", "Both say 42.", "Yes.")
    attempt = await gateway.attempt()
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    new, previous = list(history), None
    async with client_of(attempt) as client:
        for _ in range(3):
            sent: dict[str, Any] = {"input": new, "previous_response_id": previous} if by_id else {"input": history}
            answer = await ask(client, stream, tools=TOOLS, instructions="Use tools.", **sent)
            previous = answer.id
            calls = [item for item in answer.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "42 ✓"} for call in calls]
            if calls:
                assert answer.output_text == "Let me see."
                assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                    ("search", {"q": "ü"}),
                    ("lookup", {}),
                ]
            else:
                new = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure?"}]}]
            history += [item.model_dump(exclude_none=True) for item in answer.output] + new
    transitions = await attempt.transitions()
    assert len(transitions) == 3
    assert_prefix(transitions)
    assert prompt_of(gateway, transitions[1]).endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42 ✓\n</tool_response>\n"
        "<tool_response>\n42 ✓\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_calls_and_results_that_alternate_are_still_one_answer(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(CALLS, "42")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, False, input=QUESTION, tools=TOOLS)
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        for call in answer.output:
            history += [
                call,
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": [{"type": "input_text", "text": "r"}],
                },
            ]
        await ask(client, False, input=history, tools=TOOLS)
    assert_prefix(await attempt.transitions())


async def test_other_instructions_break_the_prefix_but_keep_the_conversation(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("one", "two", "three")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        first = await ask(client, False, input="a", instructions="X")
        second = await ask(client, False, input="b", instructions="X", previous_response_id=first.id)
        await ask(client, False, input="c", instructions="Y", previous_response_id=second.id)
    transitions = await attempt.transitions()
    assert [transition.is_break for transition in transitions] == [False, False, True]
    assert prompt_of(gateway, transitions[2]) == (
        "<|im_start|>system\nY<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_two_conversations_may_go_on_from_one_response(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        first = await ask(client, False, input="a")
        for text in ("b", "c"):
            await ask(client, False, input=text, previous_response_id=first.id)
    transitions = await attempt.transitions()
    assert [transition.parent_id for transition in transitions] == [None, transitions[0].id, transitions[0].id]


async def test_a_previous_response_outlives_a_restart_of_the_gateway(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue("one", "two", "three", "four")
    async with client_of(attempt) as client:
        first = await ask(client, False, input="a", instructions="X")
    restarted = create_gateway(gateway.store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)})
    path = attempt.base_url.removeprefix(gateway.url) + "/responses"
    transport = httpx.ASGITransport(app=Starlette(routes=restarted.routes))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"x-api-key": attempt.key}
    ) as client:
        body = {"model": "m", "input": "b", "instructions": "X", "previous_response_id": first.id}
        second = (await client.post(path, json=body)).json()
        assert second["output"][0]["content"][0]["text"] == "two"
        assert (await client.post(path, json={**body, "previous_response_id": second["id"]})).status_code == 200
        other = await client.post(path, json={**body, "instructions": "Y"})
    assert_prefix(await attempt.transitions())
    assert (other.status_code, other.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert (
        "its messages went with a restart of the server; send the whole conversation"
        in other.json()["error"]["message"]
    )


async def test_an_unknown_previous_response_is_told(gateway: LiveGateway) -> None:
    attempt, other = await gateway.attempt(), await gateway.attempt()
    async with client_of(other) as client:
        foreign = await ask(client, False, input="a")
    async with client_of(attempt) as client:
        for unknown in ("resp_123", "nonsense", foreign.id):
            with pytest.raises(openai.BadRequestError, match="no previous response") as caught:
                await ask(client, False, input="b", previous_response_id=unknown)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert await attempt.transitions() == ()


def references(answer: Any) -> list[dict[str, Any]]:
    """The items of an answer as Vercel's AI SDK sends them back."""
    return [{"type": "item_reference", "id": item.id} for item in answer.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_that_are_named_by_their_ids_go_on_like_those_that_are_sent(
    gateway: LiveGateway, stream: bool
) -> None:
    gateway.engine.enqueue(f"<think>hm</think>Let me see.\n{CALLS}", "Both say 42.", "Yes.")
    attempt = await gateway.attempt()
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    async with client_of(attempt) as client:
        for _ in range(2):
            answer = await ask(client, stream, tools=TOOLS, input=history)
            calls = [item for item in answer.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42 ✓"} for call in calls]
            history += [*references(answer), *(results or [{"role": "user", "content": "Sure?"}])]
        await ask(client, stream, tools=TOOLS, input=history)
    transitions = await attempt.transitions()
    assert len(transitions) == 3
    assert_prefix(transitions)


async def test_some_items_are_named_and_others_sent(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(f"<think>hm</think>Let me see.\n{CALLS}", "42")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, False, tools=TOOLS, input=QUESTION)
        items: list[Any] = references(answer)
        items[2] = answer.output[2].model_dump(exclude_none=True)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in answer.output[2:]
        ]
        await ask(client, False, tools=TOOLS, input=[{"role": "user", "content": QUESTION}, *items, *results])
    assert_prefix(await attempt.transitions())


async def test_another_conversation_may_name_an_item(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("<think>hm</think>one", "two")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, False, input=QUESTION)
        named: Any = [
            {"role": "user", "content": "other"},
            {"id": answer.output[1].id},
            {"role": "user", "content": "and?"},
        ]
        await ask(client, False, input=named)
    assert prompt_of(gateway, (await attempt.transitions())[1]) == (
        "<|im_start|>user\nother<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_named_items_outlive_a_restart_of_the_gateway(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue(f"<think>hm</think>Let me see.\n{CALLS}", "two")
    async with client_of(attempt) as client:
        first = await ask(client, False, input=QUESTION, tools=TOOLS)
    restarted = create_gateway(gateway.store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)})
    path = attempt.base_url.removeprefix(gateway.url) + "/responses"
    transport = httpx.ASGITransport(app=Starlette(routes=restarted.routes))
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in first.output[2:]]
    body = {
        "model": "m",
        "tools": TOOLS,
        "input": [{"role": "user", "content": QUESTION}, *references(first), *results],
    }
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"x-api-key": attempt.key}
    ) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert_prefix(await attempt.transitions())


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_an_item_that_the_previous_conversation_holds_stands_once(
    gateway: LiveGateway, is_restarted: bool
) -> None:
    gateway.engine.enqueue(f"<think>hm</think>Let me see.\n{CALLS}", "two", "three")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        first = await ask(client, False, input=QUESTION, tools=TOOLS)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in first.output[2:]
        ]
        second = await ask(
            client, False, input=[*references(first), *results], previous_response_id=first.id, tools=TOOLS
        )
    app = gateway.gateway
    if is_restarted:
        app = create_gateway(gateway.store, gateway.engines, {"policy": PolicyRenderer(gateway.engine.tokenizer)})
    transport = httpx.ASGITransport(app=Starlette(routes=app.routes))
    items: list[Any] = [*references(first), *references(second), {"role": "user", "content": "and?"}]
    body = {"model": "m", "tools": TOOLS, "input": items, "previous_response_id": second.id}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"x-api-key": attempt.key}
    ) as http:
        path = attempt.base_url.removeprefix(gateway.url) + "/responses"
        again = {**body, "input": [second.output[0].model_dump(exclude_none=True), *items]}
        refused = await http.post(path, json=again)
        assert (refused.status_code, "holds already; leave it out" in refused.text) == (400, True)
        assert (await http.post(path, json=body)).status_code == 200
    transitions = await attempt.transitions()
    assert_prefix(transitions)
    text = prompt_of(gateway, transitions[-1])
    assert (text.count("Let me see."), text.count("two")) == (1, 1)


async def test_an_item_of_no_answer_is_told(gateway: LiveGateway) -> None:
    attempt, other = await gateway.attempt(), await gateway.attempt()
    async with client_of(other) as client:
        foreign = await ask(client, False, input="a")
    async with client_of(attempt) as client:
        own = await ask(client, False, input="a")
        of_own = own.output[0].id
        for unknown in (
            "msg_1",
            foreign.output[0].id,
            of_own.replace("msg_", "fc_") + "_0",
            of_own.replace("msg_", "rs_"),
            of_own[4:],
            7,
        ):
            with pytest.raises(
                openai.BadRequestError, match=r"input\[0\] refers to the item .*no answer of this attempt"
            ) as caught:
                await ask(
                    client, False, input=[{"type": "item_reference", "id": unknown}, {"role": "user", "content": "b"}]
                )
            assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0]")
        call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        with pytest.raises(openai.BadRequestError, match="used by two calls"):
            await ask(client, False, input=[*references(own), call, call])
    assert len(await attempt.transitions()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_is_incomplete(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("abcdefgh")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer: Any
        if stream:
            events = [
                event
                async for event in await client.responses.create(model="m", input="a", max_output_tokens=4, stream=True)
            ]
            assert events[-1].type == "response.incomplete"
            answer = events[-1].response
        else:
            answer = await client.responses.create(model="m", input="a", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == (
        "incomplete",
        "max_output_tokens",
        "abcd",
    )
    assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_the_recorded_ones(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("hé")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, stream, input="a", include=["message.output_text.logprobs"], top_logprobs=1)
    (transition,) = await attempt.transitions()
    entries = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == transition.logprobs.tolist()
    assert entries[0].token == "h" and entries[0].top_logprobs[0].token == "h"


class Verdict(pydantic.BaseModel):
    answer: int


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output_is_parsed_by_the_sdk(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue('{"answer": 42}')
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        if stream:
            async with client.responses.stream(model="m", input=QUESTION, text_format=Verdict) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.parse(model="m", input=QUESTION, text_format=Verdict)
    assert answer.output_parsed == Verdict(answer=42)
    (transition,) = await attempt.transitions()
    assert "fits this JSON schema" in prompt_of(gateway, transition)


class Search(pydantic.BaseModel):
    q: str


@pytest.mark.parametrize("stream", [False, True])
async def test_function_arguments_are_parsed_by_the_sdk(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue('<tool_call>\n{"name": "Search", "arguments": {"q": "ü"}}\n</tool_call>')
    attempt = await gateway.attempt()
    tool = openai.pydantic_function_tool(Search)["function"]
    async with client_of(attempt) as client:
        request: Any = {"model": "m", "input": QUESTION, "tools": [{"type": "function", **tool}]}
        answer: Any
        if stream:
            async with client.responses.stream(**request) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.parse(**request)
    assert json.loads(answer.output[0].arguments) == {"q": "ü"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_answer_is_an_empty_message(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(client, stream, input="a")
    assert (answer.output_text, len(answer.output)) == ("", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_one_transition(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("first", "second")
    attempt = await gateway.attempt()
    async with client_of(attempt, default_headers={"x-lightningrl-call-id": "c1"}) as client:
        answers = [await ask(client, stream, input="a") for _ in range(2)]
        assert answers[0] == answers[1]
        following = await ask(
            client, stream, input="b", previous_response_id=answers[1].id, extra_headers={"x-lightningrl-call-id": "c2"}
        )
        assert following.output_text == "second"
    assert len(await attempt.transitions()) == 2


async def test_an_error_in_mid_stream_is_raised_by_the_sdk(gateway: LiveGateway) -> None:
    from lightningrl.types import Outcome

    gateway.engine.enqueue("a long answer")
    gateway.engine.token_delay_s = 0.05
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        with pytest.raises(openai.APIError, match="attempt 1"):
            async with client.responses.stream(model="m", input="a") as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        await gateway.store.finish_attempt(attempt.rollout_id, 1, Outcome.TIMEOUT)
    assert await attempt.transitions() == ()


async def test_what_does_not_change_the_prompt_is_taken(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await ask(
            client,
            False,
            input=QUESTION,
            truncation="auto",
            context_management=[{"type": "compaction", "compact_threshold": 9000}],
        )
    assert (answer.output_text, answer.truncation) == ("ok", "auto")
