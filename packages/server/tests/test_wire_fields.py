"""Fields of calls and answers as other servers have them: ids, models, request ids, names, parts, sampling."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from sizes import PATIENCE_S

from lightningrl.types import SamplingSettings, ToolStatus
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALLS = "".join(f'<tool_call>\n{{"name": "look", "arguments": {{"q": "{q}"}}}}\n</tool_call>' for q in "ab")
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as live:
        yield live


@asynccontextmanager
async def client_of(attempt: LiveAttempt) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {attempt.key}"}
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers, trust_env=False) as client:
        yield client


async def prompt_of(gateway: LiveGateway, path: str, **body: Any) -> str:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await client.post(f"{attempt.base_url}/{path}", json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    (call,) = await attempt.transitions()
    return str(gateway.engine.tokenizer.decode(call.prompt_ids.tolist()))


async def refusal_of(gateway: LiveGateway, path: str, **body: Any) -> str:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await client.post(f"{attempt.base_url}/{path}", json={"model": "m", **body})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_answers_and_items_are_those_that_openai_takes_back(gateway: LiveGateway, stream: bool) -> None:
    attempt = await gateway.attempt(rollout_id="a.task:" + "x" * 80)
    gateway.engine.enqueue(CALLS, "done")
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        asked: dict[str, Any] = {"model": "m", "tools": [{"type": "function", **LOOK}]}
        if stream:
            async with client.responses.stream(input="hi", **asked) as events:
                first = await events.get_final_response()
        else:
            first = await client.responses.create(input="hi", **asked)
        items: list[Any] = list(first.output)
        ids = [first.id, *(item.id for item in items)]
        assert len(ids) == 3 and all(ID.fullmatch(str(name)) for name in ids), ids
        back: list[Any] = [{"type": "item_reference", "id": name} for name in ids[1:]]
        back += [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in items]
        await client.responses.create(input=[{"role": "user", "content": "hi"}, *back], **asked)
    earlier, later = await attempt.transitions()
    assert later.parent_id == earlier.id and not later.is_break


async def test_the_standards_fields_are_in_a_response_and_its_events(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt(sampling=SamplingSettings(temperature=0.5, top_p=0.75))
    body = {"model": "m", "input": "hi", "tools": [{"type": "function", **LOOK}], "max_tool_calls": 2}
    body |= {"safety_identifier": "s", "prompt_cache_key": "k"}
    async with client_of(attempt) as client:
        whole = (await client.post(f"{attempt.base_url}/responses", json=body)).json()
        events = (await client.post(f"{attempt.base_url}/responses", json=body | {"stream": True})).text
    responses = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    streamed = [event["response"] for event in responses if "response" in event]
    for response in (whole, *streamed):
        assert response["temperature"] == 0.5 and response["top_p"] == 0.75
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0, 0)
        assert (response["max_tool_calls"], response["service_tier"]) == (2, "default")
        assert (response["safety_identifier"], response["prompt_cache_key"]) == ("s", "k")
        (tool,) = response["tools"]
        assert tool["strict"] is False and tool["description"] is None
        is_done = response["status"] == "completed"
        assert isinstance(response["completed_at"], int) if is_done else response["completed_at"] is None
    assert {response["status"] for response in streamed} == {"in_progress", "completed"}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat/completions", lambda asked: {"response_format": asked}),
        ("responses", lambda asked: {"text": {"format": asked}}),
        ("messages", lambda asked: {"output_config": {"format": asked}, "max_tokens": 9}),
    ],
)
async def test_a_schema_beside_json_object_is_honoured(gateway: LiveGateway, path: str, field: Any) -> None:
    said: dict[str, Any] = {"input" if path == "responses" else "messages": [USER]}
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    prompt = await prompt_of(gateway, path, **said, **field({"type": "json_object", "schema": schema}))
    assert "fits this JSON schema" in prompt and '"answer"' in prompt
    assert "One JSON" not in await prompt_of(gateway, path, **said, **field({"type": "json_object", "schema": {}}))
    for wrong in (123, "x", [schema], False):
        sentence = await refusal_of(gateway, path, **said, **field({"type": "json_object", "schema": wrong}))
        assert "give a JSON schema as an object" in sentence


async def test_anthropics_client_lists_models_and_knows_the_ids_of_its_requests(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    url = attempt.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=attempt.key, max_retries=0) as client:
        (model,) = (await client.models.list()).data
        assert (model.type, model.display_name, model.created_at.year) == ("model", "policy", 1970)
        assert (await client.models.retrieve("policy")).id == "policy"
        message = await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        assert message._request_id is not None and ID.fullmatch(message._request_id)
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="m", max_tokens=9, messages=[])
        assert refused.value.request_id and refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
        with pytest.raises(anthropic.APIStatusError) as unknown:
            await client.with_options(api_key="wrong").models.list()
        assert unknown.value.body["type"] == "error" and unknown.value.request_id  # type: ignore[index]


async def test_a_refused_call_is_found_by_its_request_id(
    gateway: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = await gateway.attempt()
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        said = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        response = await client.responses.create(model="m", input="hi")
        ids = {said._request_id, response._request_id}
        with caplog.at_level(logging.INFO), pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[])
        ids.add(refused.value.request_id)
        assert len(ids) == 3 and None not in ids
        assert refused.value.response.json()["request_id"] == refused.value.request_id
        assert f"call {refused.value.request_id} refused" in caplog.text
        with pytest.raises(openai.NotFoundError) as lost:
            await client.get("/nowhere", cast_to=object)
        assert lost.value.request_id


NAMED = "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content }}\n{% endfor %}"


async def test_names_reach_a_template_that_reads_them_and_tell_conversations_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [USER | {"name": "alice"}, USER | {"name": "bob"}]
    async with live_gateway(tmp_path / "plain") as gateway:
        for _ in range(2):
            assert "alice" not in await prompt_of(gateway, "chat/completions", messages=messages)
        assert caplog.text.count("does not show it") == 1
    caplog.clear()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = NAMED
    async with live_gateway(tmp_path / "read", engine=ScriptedEngine(tokenizer)) as gateway:
        prompt = await prompt_of(gateway, "chat/completions", messages=messages)
        assert "user (alice): hi" in prompt and "user (bob): hi" in prompt and "does not show" not in caplog.text


PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}, {"type": "text", "text": ""}]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "result"])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_text_parts_become_one_text_with_a_newline_between(gateway: LiveGateway, path: str, role: str) -> None:
    said: list[Any] = [USER, {"role": role, "content": PARTS}, USER]
    more: dict[str, Any] = {"max_tokens": 9} if path == "messages" else {}
    if role == "result" and path == "messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": PARTS}
        said[1:2] = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    elif role == "result" and path == "responses":
        output = [{"type": "input_text", "text": part["text"]} for part in PARTS]
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        said[1:2] = [call, {"type": "function_call_output", "call_id": "c", "output": output}]
    elif role == "result":
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        said[1:2] = [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": PARTS},
        ]
    elif role == "system" and path == "messages":
        said, more = [USER], {**more, "system": PARTS}
    prompt = await prompt_of(gateway, path, **{"input" if path == "responses" else "messages": said}, **more)
    assert "A\nB" in prompt and "A\nB\n\n" not in prompt


async def test_logprobs_of_other_tokens_than_the_sampled_one_are_refused(gateway: LiveGateway) -> None:
    for path, body in (("chat/completions", {"messages": [USER], "logprobs": True}), ("responses", {"input": "hi"})):
        sentence = await refusal_of(gateway, path, **body, top_logprobs=2)
        assert "top_logprobs is 2; only the sampled token's logprob is known: ask for at most 1" in sentence
        await prompt_of(gateway, path, **body, top_logprobs=1)


async def test_options_that_hold_for_nothing_are_refused(gateway: LiveGateway) -> None:
    sentence = await refusal_of(
        gateway, "chat/completions", messages=[USER], stream_options={"include_usage": True}, stream=False
    )
    assert sentence == "stream_options is for streams alone; set stream to true, or leave it out"
    for path in ("chat/completions", "responses"):
        body = {"input" if path == "responses" else "messages": [USER], "tool_choice": {}}
        assert "tool_choice is empty; use 'auto'" in await refusal_of(gateway, path, **body)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_half_an_emoji_is_read_as_a_replacement_character(gateway: LiveGateway, path: str) -> None:
    attempt = await gateway.attempt()
    key = "input" if path == "responses" else "messages"
    text = r'{"model": "m", "max_tokens": 9, "%s": [{"role": "user", "content": "\ud83d|\ud83d\ude00|\\ud83d|\ude00"}]}'
    body = text % key if path != "responses" else text.replace("max_tokens", "max_output_tokens") % key
    async with client_of(attempt) as client:
        answer = await client.post(f"{attempt.base_url}/{path}", content=body)
    assert answer.status_code == 200, answer.text
    (call,) = await attempt.transitions()
    prompt = gateway.engine.tokenizer.decode(call.prompt_ids.tolist())
    assert r"\ud83d|" in prompt and "\ud83d" not in prompt


async def test_a_retry_whose_first_try_never_came_is_no_earlier_equal_call(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue("one", "two", "three")
    body = {"model": "m", "messages": [USER]}
    async with client_of(attempt) as client:  # one connection: each call has the answer to the one before
        answers = [
            (await client.post(f"{attempt.base_url}/chat/completions", json=body, headers=headers)).json()
            for headers in ({}, {}, {"x-stainless-retry-count": "1"})
        ]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["one", "two", "three"]
    assert len(await attempt.transitions()) == 3


async def test_a_call_of_no_rollout_is_sampled_as_its_client_says(tmp_path: Path) -> None:
    recipe = SamplingSettings(temperature=0.75, top_p=0.5, top_k=3, max_tokens=20, seed=1)
    settings = GatewaySettings(sampling={"policy": recipe}, plain_rollout="by-hand")
    asked = {"temperature": 0, "top_p": 0.25, "top_k": 7, "max_tokens": 30, "seed": 5}
    async with live_gateway(tmp_path, settings=settings) as gateway:
        plain, rollout = await gateway.attempt(rollout_id="by-hand"), await gateway.attempt()
        async with client_of(plain) as client:
            url = f"{gateway.url}/v1/chat/completions"
            odd = {"temperature": "0", "top_k": -1, "extra_body": {"temperature": 1, "top_p": 0.25}}
            for body in (asked, odd, {}):
                assert (await client.post(url, json={"messages": [USER], **body})).status_code == 200
            for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}):
                answer = await client.post(url, json={"messages": [USER], **wrong})
                assert answer.status_code == 400 and "it must be" in answer.json()["error"]["message"]
            for more in ({"min_p": 0.1}, {"presence_penalty": -0.5}, {"extra_body": {"repetition_penalty": 1.1}}):
                answer = await client.post(url, json={"messages": [USER], **more})
                assert answer.status_code == 400 and "is not supported: this engine samples by" in answer.text
        async with client_of(rollout) as client:
            await client.post(f"{rollout.base_url}/chat/completions", json={"messages": [USER], **asked})

        def said(sampling: SamplingSettings) -> tuple[Any, ...]:
            return sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.seed

        as_asked, as_odd, as_said = [call.sampling for call in await plain.transitions()]
        (of_rollout,) = [call.sampling for call in await rollout.transitions()]
        assert said(as_asked) == (0.0, 0.25, 7, 30, 5)
        assert said(as_odd) == (0.0, 0.25, 0, 20, 1)
        assert said(as_said) == said(of_rollout) == (0.75, 0.5, 3, 20, 1)


def tool_span(number: int, name: str, call_id: str | None) -> dict[str, Any]:
    values = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in values.items() if value]
    named = {"traceId": "5b" * 16, "spanId": f"{number:016x}", "name": f"execute_tool {name}"}
    return {**named, "startTimeUnixNano": "1", "endTimeUnixNano": "2", "attributes": attributes, "status": {"code": 1}}


def model_span(number: int, inside: int) -> dict[str, Any]:
    asked = [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}]
    return {**tool_span(number, "chat", None), "attributes": asked, "parentSpanId": f"{inside:016x}"}


async def test_a_tool_is_one_record_by_its_items_id_and_none_that_nobody_knows(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue(CALLS, 'I run helper("x") myself')
    async with client_of(attempt) as client:
        body = {"model": "m", "input": "hi", "tools": [{"type": "function", **LOOK}]}
        output = (await client.post(f"{attempt.base_url}/responses", json=body)).json()["output"]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in output]
        await client.post(f"{attempt.base_url}/responses", json=body | {"input": [USER, *output, *results]})
        spans = [
            tool_span(1, "look", output[0]["id"]),
            tool_span(2, "look", f"{output[1]['call_id']}|{output[1]['id']}"),
            tool_span(3, "GyYWvrkAPqDmoSAK", None),
            tool_span(4, "helper", None),
            model_span(5, inside=3),  # as Semantic Kernel's prompts have one
            model_span(6, inside=4),
            tool_span(7, "own", None),  # of a program that reports by OpenTelemetry what it ran
        ]
        export = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "agno"}, "spans": spans}]}]}
        url = f"{gateway.url}/api/v1/rollouts/{attempt.rollout_id}/attempts/1/v1/traces"
        assert (await client.post(url, json=export)).status_code == 200
        ended = await client.post(url.replace("v1/traces", "result"), json={"outcome": "succeeded"})
        assert ended.status_code < 300, ended.text
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    named = [(tool.name, tool.id, tool.status) for tool in trajectory.tool_calls]
    ids = [item["call_id"] for item in output]
    assert {tool for tool in named if tool[0] == "look"} == {("look", name, ToolStatus.OK) for name in ids}
    assert sorted(name for name, _, _ in named) == ["helper", "look", "look", "own"]


@pytest.mark.parametrize(
    ("path", "asked", "sentence"),
    [
        ("responses", {"response_format": {"type": "json_object"}}, "send text.format in its place"),
        ("responses", {"max_tokens": 5}, "max_tokens is not read in this API; send max_output_tokens in its place"),
        ("responses", {"stop": ["x"]}, "stop is not read in this API; leave it out"),
        ("responses", {"system": "Be brief."}, "send instructions in its place"),
        ("chat/completions", {"system": "Be brief."}, "system is not read in this API; send a system message in its"),
        ("chat/completions", {"stop_sequences": ["x"]}, "send stop in its place"),
        ("chat/completions", {"sampling_params": {"max_new_tokens": 5}}, "sampling_params.max_new_tokens is not read"),
        ("chat/completions", {"extra_body": {"seed": 5}}, "extra_body.seed is not read in this API; send seed in its"),
        ("messages", {"response_format": {"type": "json_object"}}, "send output_config.format in its place"),
        ("messages", {"stop": "x", "n": 1}, "send stop_sequences in its place"),
        ("messages", {"n": 2}, "n is not read in this API; leave it out"),
    ],
)
async def test_another_apis_field_that_changes_prompt_or_answer_is_refused_with_this_apis(
    gateway: LiveGateway, path: str, asked: dict[str, Any], sentence: str
) -> None:
    said: dict[str, Any] = {"input" if path == "responses" else "messages": [USER]}
    assert sentence in await refusal_of(gateway, path, **said, **asked)
    bounds = {"max_tokens": 9, "max_output_tokens": 9}  # both, for whichever API it is
    await prompt_of(gateway, path, **said, **bounds, n=1, stop_sequences=[], functions=[], extra_body={"user": "u"})


@pytest.mark.parametrize("mark", ["prefix", "partial"])
async def test_a_beginning_of_the_answer_is_refused_and_not_taken_for_a_turn(gateway: LiveGateway, mark: str) -> None:
    begun = {"role": "assistant", "content": "Sure, ", mark: True}
    sentence = await refusal_of(gateway, "chat/completions", messages=[USER, begun])
    assert f"messages[1] has {mark}: a policy does not go on with an answer" in sentence
    await prompt_of(gateway, "chat/completions", messages=[USER, begun | {mark: False}])


async def test_examples_of_a_tools_input_reach_the_policy(gateway: LiveGateway) -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": LOOK["parameters"]}
    said: dict[str, Any] = {"messages": [USER], "max_tokens": 9}
    prompt = await prompt_of(gateway, "messages", **said, tools=[{**tool, "input_examples": [{"q": "lakes"}]}])
    assert "Looks." in prompt and "Examples of its input:" in prompt and "lakes" in prompt
    sentence = await refusal_of(gateway, "messages", **said, tools=[{**tool, "input_examples": ["lakes"]}])
    assert sentence == "tools[0] has input_examples that are no list of objects"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_formats_description_is_shown_and_what_nobody_reads_of_it_refused(
    gateway: LiveGateway, path: str
) -> None:
    parts = {"name": "a", "description": "The lake's name.", "schema": {"type": "object"}}
    chat = {"response_format": {"type": "json_schema", "json_schema": parts}}
    asked: dict[str, Any] = {"text": {"format": {"type": "json_schema", **parts}}} if path == "responses" else chat
    said: dict[str, Any] = {"input" if path == "responses" else "messages": [USER]}
    assert "Description of the answer: The lake's name." in await prompt_of(gateway, path, **said, **asked)
    wrong = {"type": "json_object", "response_schema": {"type": "object"}}
    asked = {"text": {"format": wrong}} if path == "responses" else {"response_format": wrong}
    assert "has 'response_schema', which is not read" in await refusal_of(gateway, path, **said, **asked)


async def test_a_number_beyond_any_floats_range_is_refused_by_its_fields_name(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_logits": 1e999}'
        answer = await client.post(f"{attempt.base_url}/chat/completions", content=body)
    assert answer.status_code == 400 and "top_logits cannot be read" in answer.json()["error"]["message"]


async def test_a_report_by_an_items_id_is_of_the_call_that_the_item_asks_for(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    gateway.engine.enqueue(CALLS, "done")
    async with client_of(attempt) as client:
        body = {"model": "m", "input": "hi", "tools": [{"type": "function", **LOOK}]}
        output = (await client.post(f"{attempt.base_url}/responses", json=body)).json()["output"]
        told = [
            {"name": "look", "status": status, "tool_call_id": item["id"]}
            for item, status in zip(output, ("ok", "error"), strict=True)
        ]
        answer = await client.post(f"{attempt.base_url}/tool_calls", json={"tool_calls": told})
        assert answer.status_code < 300, answer.text
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in output]
        await client.post(f"{attempt.base_url}/responses", json=body | {"input": [USER, *output, *results]})
        url = f"{gateway.url}/api/v1/rollouts/{attempt.rollout_id}/attempts/1/result"
        assert (await client.post(url, json={"outcome": "succeeded"})).status_code < 300
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    statuses = {(tool.id, tool.status) for tool in trajectory.tool_calls}
    assert statuses == {(output[0]["call_id"], ToolStatus.OK), (output[1]["call_id"], ToolStatus.ERROR)}


async def test_a_response_says_its_format_again_with_the_fields_that_were_left_out(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    asked = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    async with client_of(attempt) as client:
        body = {"model": "m", "input": "hi", "text": {"format": asked}}
        response = (await client.post(f"{attempt.base_url}/responses", json=body)).json()
    assert response["text"]["format"] == {**asked, "description": None, "strict": False}
