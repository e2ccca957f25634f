"""Random histories, tools and unicode in all three dialects: never a 500, every answered call recorded once, streams as
whole answers."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sizes import PATIENCE_S, sized

from lightningrl.types import Transition
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.slow

PATHS = ("chat/completions", "responses", "messages")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = (
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([2**64, -(2**63) - 1, 10**30])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(texts, values, max_size=3)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


def objects_of(properties: dict[str, Any], closed: bool) -> dict[str, Any]:
    """A schema of an object, as pydantic writes it."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "$defs": {"thing": {"type": "string"}},
    }
    return schema | {"additionalProperties": False} if closed else schema


plain_schemas = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "number", "integer", "boolean", "null"]), "description": texts}
    ),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3), "default": values}),
    st.fixed_dictionaries(
        {"type": st.lists(st.sampled_from(["string", "null", "integer"]), min_size=1, max_size=2, unique=True)}
    ),
    st.just({"$ref": "#/$defs/thing"}),
)
schemas = st.recursive(
    plain_schemas,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "minItems": st.integers(0, 3)}),
        st.builds(
            lambda key, members: {key: members},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, max_size=2),
        ),
        st.builds(objects_of, st.dictionaries(texts, inner, max_size=2), st.booleans()),
    ),
    max_leaves=5,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "name": names,
            "description": texts,
            "parameters": st.builds(objects_of, st.dictionaries(texts, schemas, max_size=2), st.booleans()),
        }
    ),
    max_size=2,
    unique_by=lambda tool: str(tool["name"]),
)
answers = st.lists(
    st.one_of(
        texts,
        st.builds(
            lambda a: (
                "<tool_call>\n" + json.dumps({"name": "f", "arguments": a}, ensure_ascii=False) + "\n</tool_call>"
            ),
            arguments,
        ),
        st.sampled_from(
            ["<think>hm</think>", "<tool_call>", "</tool_call>", "<think>", " ", "\n", "END", "\ufffd", "🙂"]
        ),
        st.just('<tool_call>\n{"name": "f", "arguments": {"x": NaN, "y": 1e999}}\n</tool_call>'),
    ),
    max_size=4,
).map("".join)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("user"), texts),
        st.tuples(st.just("assistant"), texts),
        st.tuples(st.just("call"), arguments),
        st.tuples(st.just("result"), texts),
    ),
    max_size=5,
)


class Conversation:
    """One conversation, written in each dialect."""

    def __init__(
        self,
        system: str,
        steps: list[tuple[str, Any]],
        last: str,
        offered: list[Any],
        forced: str | None = None,
        bound: int = 1000,
    ) -> None:
        """`forced`: "any" tool or "one" by name has to be called, where there are tools. `bound`: most tokens of an
        answer."""
        self.system, self.steps, self.last, self.offered, self.bound = system, steps, last, offered, bound
        self.forced = forced if offered else None

    def body(self, path: str) -> dict[str, Any]:
        write = {"chat/completions": self._chat, "responses": self._responses, "messages": self._messages}[path]
        return {"model": "any", **write(), **self._choice(path)}

    def _choice(self, path: str) -> dict[str, Any]:
        if self.forced is None:
            return {}
        if self.forced == "any":
            return {"tool_choice": {"type": "any"} if path == "messages" else "required"}
        name = self.offered[0]["name"]
        if path == "chat/completions":
            return {"tool_choice": {"type": "function", "function": {"name": name}}}
        return {"tool_choice": {"type": "function" if path == "responses" else "tool", "name": name}}

    def _chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for index, (kind, value) in enumerate(self.steps):
            if kind == "call":
                call = {
                    "id": f"c{index}",
                    "type": "function",
                    "function": {"name": "f", "arguments": json.dumps(value)},
                }
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            elif kind == "result":
                messages.append({"role": "tool", "content": value, "tool_call_id": f"c{index - 1}"})
            else:
                messages.append({"role": kind, "content": value})
        offered = [{"type": "function", "function": tool} for tool in self.offered]
        return {
            "messages": [*messages, {"role": "user", "content": self.last}],
            "tools": offered,
            "max_completion_tokens": self.bound,
        }

    def _responses(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for index, (kind, value) in enumerate(self.steps):
            if kind == "call":
                items.append(
                    {
                        "type": "function_call",
                        "call_id": f"c{index}",
                        "name": "f",
                        "arguments": json.dumps(value),
                        "id": f"fc_lr-{index}_0",
                    }
                )
            elif kind == "result":
                items.append({"type": "function_call_output", "call_id": f"c{index - 1}", "output": value})
            elif kind == "assistant":
                part = {"type": "output_text", "text": value, "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [part], "id": f"msg_lr-{index}"})
            else:
                items.append({"role": kind, "content": value})
        offered = [{"type": "function", **tool} for tool in self.offered]
        items.append({"role": "user", "content": self.last})
        return {"instructions": self.system, "input": items, "tools": offered, "max_output_tokens": self.bound}

    def _messages(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for index, (kind, value) in enumerate(self.steps):
            if kind == "call":
                block = {"type": "tool_use", "id": f"c{index}", "name": "f", "input": value}
                messages.append({"role": "assistant", "content": [block]})
            elif kind == "result":
                messages.append(
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": f"c{index - 1}", "content": value}],
                    }
                )
            else:
                messages.append({"role": kind, "content": value})
        offered = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in self.offered
        ]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        messages.append({"role": "user", "content": self.last})
        return {
            "system": self.system,
            "messages": messages,
            "tools": offered,
            "max_tokens": self.bound,
            "thinking": thinking,
        }


conversations = st.builds(Conversation, texts, turns, texts, tools)
bounded = st.builds(
    Conversation,
    texts,
    turns,
    texts,
    tools,
    st.sampled_from([None, None, "any", "one"]),
    st.sampled_from([1, 5, 40, 1000]),
)


def said_of(path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a whole answer says, in one form for all dialects."""
    if path == "chat/completions":
        message = body["choices"][0]["message"]
        asked = [call["function"] for call in message.get("tool_calls") or []]
        calls = [(f"call {call['name']}", json.loads(call["arguments"])) for call in asked]
        return [("think", message.get("reasoning_content") or ""), ("text", message["content"] or ""), *calls]
    thought = text = ""
    calls = []
    for item in body["output"] if path == "responses" else body["content"]:
        kind = item["type"]
        if kind in ("message", "text"):
            text += item["text"] if kind == "text" else "".join(part["text"] for part in item["content"])
        elif kind in ("reasoning", "thinking"):
            thought += item["thinking"] if kind == "thinking" else "".join(part["text"] for part in item["content"])
        else:
            calls.append(
                (f"call {item['name']}", item["input"] if kind == "tool_use" else json.loads(item["arguments"]))
            )
    return [("think", thought), ("text", text), *calls]


def streamed_of(path: str, text: str) -> list[tuple[str, Any]]:
    """The same, put together from the deltas of a stream."""
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    thought = content = ""
    names: dict[Any, str] = {}
    calls: dict[Any, str] = {}
    for event in events:
        if path == "chat/completions":
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                thought += choice["delta"].get("reasoning_content") or ""
                for call in choice["delta"].get("tool_calls") or []:
                    names.setdefault(call["index"], call["function"]["name"])
                    calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
            continue
        kind, delta = event["type"], event.get("delta")
        if kind == "response.output_text.delta":
            content += delta
        elif kind == "response.reasoning_text.delta":
            thought += delta
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            names[event["item"]["id"]] = event["item"]["name"]
        elif kind == "response.function_call_arguments.delta":
            calls[event["item_id"]] = calls.get(event["item_id"], "") + delta
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]] = event["content_block"]["name"]
        elif kind == "content_block_delta":
            content += delta.get("text", "")
            thought += delta.get("thinking", "")
            if "partial_json" in delta:
                calls[event["index"]] = calls.get(event["index"], "") + delta["partial_json"]
    return [
        ("think", thought),
        ("text", content),
        *((f"call {names[key]}", json.loads(call)) for key, call in calls.items()),
    ]


def recorded(transition: Transition) -> tuple[Any, ...]:
    return (
        transition.prompt_ids.tolist(),
        transition.completion_ids.tolist(),
        transition.logprobs.tolist(),
        transition.finish_reason,
        transition.is_break,
        transition.sampling.stop,
        len(transition.tool_call_ids),
    )


class Served:
    """A live gateway on an event loop of its own, for many examples."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gateway: LiveGateway, client: httpx.AsyncClient) -> None:
        self.loop, self.gateway, self.client = loop, gateway, client

    def attempt(self) -> LiveAttempt:
        return self.loop.run_until_complete(self.gateway.attempt())

    def post(self, attempt: LiveAttempt, path: str, body: Any) -> httpx.Response:
        headers = {"x-api-key": attempt.key}
        return self.loop.run_until_complete(self.client.post(f"{attempt.base_url}/{path}", json=body, headers=headers))

    def transitions(self, attempt: LiveAttempt) -> tuple[Transition, ...]:
        return self.loop.run_until_complete(attempt.transitions())


@pytest.fixture(scope="module", params=["auto", "qwen3"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        loop = runner.get_loop()
        running = live_gateway(Path(folder), renderer=PolicyRenderer(tiny_tokenizer(), request.param))
        gateway = loop.run_until_complete(running.__aenter__())
        client = httpx.AsyncClient(timeout=PATIENCE_S)
        try:
            yield Served(loop, gateway, client)
        finally:
            loop.run_until_complete(client.aclose())
            loop.run_until_complete(running.__aexit__(None, None, None))


examples = settings(
    deadline=None,
    max_examples=sized(6, 40),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@examples
@given(conversation=bounded, said=answers)
def test_one_conversation_is_one_transition_in_every_dialect_whole_or_streamed(
    served: Served, conversation: Conversation, said: str
) -> None:
    engine = served.gateway.engine
    kept: list[tuple[Any, ...]] = []
    heard: list[list[tuple[str, Any]]] = []
    for path in PATHS:
        for stream in (False, True):
            attempt = served.attempt()
            engine.enqueue(said)
            answer = served.post(attempt, path, {**conversation.body(path), "stream": stream})
            assert answer.status_code == 200, answer.text
            heard.append(streamed_of(path, answer.text) if stream else said_of(path, answer.json()))
            (transition,) = served.transitions(attempt)
            kept.append(recorded(transition))
    assert all(one == kept[0] for one in kept)
    assert all(one == heard[0] for one in heard)


@settings(examples, max_examples=sized(4, 25))
@given(
    conversation=conversations,
    said=st.lists(answers, min_size=2, max_size=3),
    streams=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_a_tool_loop_is_the_same_transitions_in_every_dialect_whole_or_streamed(
    served: Served, conversation: Conversation, said: list[str], streams: list[bool]
) -> None:
    kept: list[list[tuple[Any, ...]]] = []
    for path in PATHS:
        for pattern in ([False] * 3, streams):
            attempt = served.attempt()
            body = conversation.body(path)
            history = body["input" if path == "responses" else "messages"]
            for text, stream in zip(said, pattern, strict=False):
                served.gateway.engine.enqueue(text)
                answer = served.post(attempt, path, {**body, "stream": stream})
                assert answer.status_code == 200, answer.text
                (*_, transition) = served.transitions(attempt)
                heard = streamed_of(path, answer.text) if stream else said_of(path, answer.json())
                history += sent_back(path, heard, transition.tool_call_ids)
            transitions = served.transitions(attempt)
            places = {transition.id: place for place, transition in enumerate(transitions)}
            parents = [None if one.parent_id is None else places[one.parent_id] for one in transitions]
            kept.append([(parent, *recorded(one)) for parent, one in zip(parents, transitions, strict=True)])
    assert [one[0] for one in kept[0]] == [None, *range(len(said) - 1)]
    assert all(one == kept[0] for one in kept)


def sent_back(path: str, heard: list[tuple[str, Any]], ids: tuple[str, ...]) -> list[dict[str, Any]]:
    """What an agent's next call has after the last one: the answer, results of its calls, and a question."""
    text = next(value for kind, value in heard if kind == "text")
    calls = [(kind.removeprefix("call "), value) for kind, value in heard if kind.startswith("call ")]
    asked = list(zip(ids, calls, strict=True))
    question = {"role": "user", "content": "go on"}
    if path == "responses":
        said: list[dict[str, Any]] = [{"role": "assistant", "content": text}] if text or not asked else []
        said += [
            {"type": "function_call", "call_id": i, "name": name, "arguments": json.dumps(value)}
            for i, (name, value) in asked
        ]
        return [*said, *({"type": "function_call_output", "call_id": i, "output": "r"} for i, _ in asked), question]
    if path == "chat/completions":
        functions = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
            for i, (name, value) in asked
        ]
        message = {"role": "assistant", "content": text, **({"tool_calls": functions} if functions else {})}
        return [message, *({"role": "tool", "tool_call_id": i, "content": "r"} for i, _ in asked), question]
    uses = [{"type": "tool_use", "id": i, "name": name, "input": value} for i, (name, value) in asked]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "r"} for i, _ in asked]
    texts = [{"type": "text", "text": text}] if text or not uses else []
    return [
        {"role": "assistant", "content": [*texts, *uses]},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]


@examples
@given(
    conversation=conversations,
    said=st.lists(answers, min_size=2, max_size=3),
    path=st.sampled_from(["responses", "messages"]),
)
def test_a_history_that_an_sdk_sends_back_never_breaks(
    served: Served, conversation: Conversation, said: list[str], path: str
) -> None:
    attempt = served.attempt()
    body = conversation.body(path)
    history = body["input" if path == "responses" else "messages"]
    for text in said:
        served.gateway.engine.enqueue(text)
        answer = served.post(attempt, path, body)
        assert answer.status_code == 200, answer.text
        if path == "responses":
            history += answer.json()["output"]
            history += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "r"}
                for item in answer.json()["output"]
                if item["type"] == "function_call"
            ]
            history.append({"role": "user", "content": "go on"})
        else:
            content = answer.json()["content"]
            history.append({"role": "assistant", "content": content})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "r"}
                for block in content
                if block["type"] == "tool_use"
            ]
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
    transitions = served.transitions(attempt)
    assert [transition.parent_id for transition in transitions] == [
        None,
        *(transition.id for transition in transitions[:-1]),
    ]
    assert not any(transition.is_break for transition in transitions)


@examples
@given(conversation=conversations, said=st.lists(answers, min_size=2, max_size=3), new=texts)
def test_going_on_by_id_is_the_same_as_sending_all_again(
    served: Served, conversation: Conversation, said: list[str], new: str
) -> None:
    prompts: list[list[list[int]]] = []
    for by_id in (False, True):
        attempt = served.attempt()
        body = conversation.body("responses")
        for text in said:
            served.gateway.engine.enqueue(text)
            answer = served.post(attempt, "responses", body)
            assert answer.status_code == 200, answer.text
            output = answer.json()["output"]
            calls = [item["call_id"] for item in output if item["type"] == "function_call"]
            added = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
            added.append({"role": "user", "content": new})
            if by_id:
                body = {**body, "input": added, "previous_response_id": answer.json()["id"]}
            else:
                body["input"] += [*output, *added]
        transitions = served.transitions(attempt)
        assert not any(transition.is_break for transition in transitions)
        prompts.append([transition.prompt_ids.tolist() for transition in transitions])
    assert prompts[0] == prompts[1]


message_fields = st.sampled_from(
    ["messages", "input", "role", "content", "type", "text", "name", "arguments", "output", "tool_calls"]
)
other_fields = st.sampled_from(
    ["tools", "stop_sequences", "tool_choice", "call_id", "tool_use_id", "id", "instructions", "system"]
)
tool_fields = st.sampled_from(
    ["previous_response_id", "function", "input_schema", "parameters", "include", "properties", "description"]
)
fields = message_fields | other_fields | tool_fields
words = st.sampled_from(
    ["user", "assistant", "tool", "message", "function_call", "function_call_output", "reasoning", "text", "tool_use"]
)
words |= st.sampled_from(
    ["tool_result", "thinking", "function", "system", "object", "json_schema", "input_text", "image"]
)
anything = st.recursive(
    values | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=5),
    max_leaves=12,
)


@settings(examples, max_examples=sized(40, 150))
@given(
    body=st.dictionaries(fields, anything, max_size=6),
    path=st.sampled_from([*PATHS, "messages/count_tokens", "embeddings"]),
)
def test_no_body_is_answered_with_an_error_of_ours(served: Served, body: dict[str, Any], path: str) -> None:
    attempt = served.attempt()
    answer = served.post(attempt, path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    is_call = answer.status_code == 200 and path != "messages/count_tokens"
    assert len(served.transitions(attempt)) == int(is_call)
