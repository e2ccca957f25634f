"""Fields that ask for nothing are taken, in every shape that clients give them; what asks for something is honoured or
refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.types import Transition
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer

USER: Any = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "messages": [USER], "input": "hi", "max_tokens": 9, "max_output_tokens": 9}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, Any] = {
    "chat/completions": [{"type": "function", "function": LOOK}],
    "responses": [{"type": "function", **LOOK}],
    "messages": [{"name": "look", "input_schema": LOOK["parameters"]}],
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


async def post(attempt: LiveAttempt, body: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(
            f"{attempt.base_url}/{path}", json=body, headers={"authorization": f"Bearer {attempt.key}"}
        )


async def answered(gateway: LiveGateway, body: dict[str, Any], path: str = "chat/completions") -> Transition:
    """The call as it is recorded."""
    attempt = await gateway.attempt()
    answer = await post(attempt, {**BODY, **body}, path)
    assert answer.status_code == 200, answer.text
    (transition,) = await attempt.transitions()
    return transition


async def refused(gateway: LiveGateway, body: dict[str, Any], path: str = "chat/completions") -> str:
    attempt = await gateway.attempt()
    answer = await post(attempt, {**BODY, **body}, path)
    assert answer.status_code == 400, answer.text
    assert await attempt.transitions() == ()
    return str(answer.json()["error"]["message"])


async def prompt(gateway: LiveGateway, messages: list[Any], path: str = "chat/completions", **more: Any) -> str:
    """The text that the policy reads."""
    call = await answered(gateway, {"messages": messages, **more}, path)
    return str(gateway.engine.tokenizer.decode(call.prompt_ids))


NOTHING: list[dict[str, Any]] = [
    {"function_call": "none"},
    {"function_call": "auto"},
    {"functions": [], "function_call": {}},
    {"logit_bias": {"50256": 0, "7": 0.0}},
    {"logit_bias": {}},
    {"logit_bias": []},
    {"n": 1.0},
    {"top_logprobs": 0.0},
    {"max_tokens": 9.0},
    {"max_tokens": None, "max_completion_tokens": 9.0},
    {"model": None},
    {"modalities": ["text"], "audio": {"voice": "alloy", "format": "wav"}},
    {"modalities": []},
    {"stop": []},
    {"stop": [None, ""]},
    {"response_format": {"type": "text"}},
    {"response_format": "text"},
    {"response_format": {}},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": {"type": "none"}},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": ""},
    {"stream": False, "stream_options": {}},
    {"stream": 0, "logprobs": 0, "parallel_tool_calls": 1},
    {"previous_response_id": ""},
    {"messages": [{**USER, "tool_calls": None, "function_call": None, "audio": None, "refusal": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": ""}]}]},
    {"messages": [{**USER, "tool_calls": [], "name": None}]},
]


@pytest.mark.parametrize("change", NOTHING, ids=str)
async def test_what_asks_for_nothing_is_taken(gateway: LiveGateway, change: dict[str, Any]) -> None:
    plain, call = await answered(gateway, {}), await answered(gateway, change)
    assert call.prompt_ids.tolist() == plain.prompt_ids.tolist()
    assert call.sampling == plain.sampling


SOMETHING: list[tuple[dict[str, Any], str]] = [
    ({"function_call": {"name": "look"}}, "use tools"),
    ({"logit_bias": {"50256": 0, "7": -1}}, "logit_bias is not supported"),
    ({"logit_bias": "no"}, "logit_bias is not supported"),
    ({"modalities": ["audio"]}, "text only"),
    ({"web_search_options": {}}, "web_search_options is not supported"),
    ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
    ({"seed": 0.5}, "seed is 0.5; it must be a whole number"),
    ({"n": 2.000001}, "n is 2.000001; it must be a whole number"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"tool_choice": {"type": "required"}}, "tool_choice asks for a tool call, but no tools are offered"),
]


@pytest.mark.parametrize(("change", "sentence"), SOMETHING, ids=str)
async def test_what_asks_for_something_that_we_cannot_do_is_refused_by_name(
    gateway: LiveGateway, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in await refused(gateway, change)


@pytest.mark.parametrize(("path", "name"), [("responses", "max_output_tokens"), ("messages", "max_tokens")])
async def test_whole_floats_are_whole_numbers_in_every_dialect(gateway: LiveGateway, path: str, name: str) -> None:
    assert (await answered(gateway, {name: 7.0}, path)).sampling.max_tokens == 7
    assert f"{name} is 7.5; it must be a whole number" in await refused(gateway, {name: 7.5}, path)


async def test_a_seed_that_is_a_whole_float_is_that_seed(gateway: LiveGateway) -> None:
    assert (await answered(gateway, {"seed": 7.0})).sampling.seed == 7


@pytest.mark.parametrize("choice", ["required", "any", {"type": "required"}, {"type": "any"}], ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_tool_call_is_asked_for_in_every_spelling(gateway: LiveGateway, path: str, choice: Any) -> None:
    call = await answered(gateway, {"tools": TOOLS[path], "tool_choice": choice}, path)
    assert gateway.engine.tokenizer.decode(call.prompt_ids).endswith('<tool_call>\n{"name": "look", "arguments":')


NAMED: list[Any] = [
    {"type": "function", "function": {"name": "look"}},
    {"type": "function", "name": "look"},
    {"type": "tool", "name": "look"},
    {"function": {"name": "look"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]},
    },
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
]


@pytest.mark.parametrize("choice", NAMED, ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_tool_is_named_as_any_of_the_apis_name_it(gateway: LiveGateway, path: str, choice: Any) -> None:
    call = await answered(gateway, {"tools": TOOLS[path], "tool_choice": choice}, path)
    assert gateway.engine.tokenizer.decode(call.prompt_ids).endswith('<tool_call>\n{"name": "look", "arguments":')


@pytest.mark.parametrize("choice", ["none", {"type": "none"}], ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_no_tool_call_is_read_where_none_is_wanted(gateway: LiveGateway, path: str, choice: Any) -> None:
    gateway.engine.enqueue('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    assert (await answered(gateway, {"tools": TOOLS[path], "tool_choice": choice}, path)).tool_call_ids == ()


async def test_only_some_of_the_tools_may_be_called_is_refused_and_all_of_them_is_nothing(gateway: LiveGateway) -> None:
    both = [*TOOLS["chat/completions"], {"type": "function", "function": {"name": "go"}}]
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in both]
    every = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    plain, call = (
        await answered(gateway, {"tools": both}),
        await answered(gateway, {"tools": both, "tool_choice": every}),
    )
    assert call.prompt_ids.tolist() == plain.prompt_ids.tolist()
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named[:1]}}
    assert "offer those tools alone" in await refused(gateway, {"tools": both, "tool_choice": some})


def turn(call_id: str | None, result: str, *, name: str = "look", arguments: Any = "{}") -> list[Any]:
    """A tool call and its result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call if call_id is None else {**call, "id": call_id}]},
        {"role": "tool", "content": result, **({} if call_id is None else {"tool_call_id": call_id})},
    ]


@pytest.mark.parametrize("call_id", ["call_0", "", " ", "null", None])
async def test_a_tool_call_id_may_come_back_once_its_call_has_its_result(
    gateway: LiveGateway, call_id: str | None
) -> None:
    messages = [USER, *turn(call_id, "one"), *turn(call_id, "two"), *turn(call_id, "three")]
    text = await prompt(gateway, messages, tools=TOOLS["chat/completions"])
    assert all(text.count(f"<tool_response>\n{result}\n</tool_response>") == 1 for result in ("one", "two", "three"))


@pytest.mark.parametrize("call_id", ["call_0", "", None])
async def test_a_result_has_the_name_of_the_call_before_it(tmp_path: Path, call_id: str | None) -> None:
    template = CHATML_TEMPLATE.replace(
        "message.content + '\\n</tool_resp", "message.name + ': ' + message.content + '\\n</tool_resp"
    )
    async with live_gateway(tmp_path, engine=ScriptedEngine(tiny_tokenizer(chat_template=template))) as gateway:
        messages = [USER, *turn(call_id, "1", name="look"), *turn(call_id, "2", name="go")]
        text = await prompt(gateway, messages, tools=TOOLS["chat/completions"])
        assert "\nlook: 1\n" in text and "\ngo: 2\n" in text


async def test_two_open_calls_of_one_id_are_refused_and_two_without_an_id_are_taken(gateway: LiveGateway) -> None:
    (asked, told), (asked_too, told_too) = turn("c", "one"), turn("c", "two")
    both = {**asked, "tool_calls": [*asked["tool_calls"], *asked_too["tool_calls"]]}
    assert "the tool-call id 'c' is used by two calls" in await refused(
        gateway, {"messages": [USER, both, told, told_too]}
    )
    assert "the tool-call id 'c' is used by two calls" in await refused(
        gateway, {"messages": [USER, asked, asked_too, told]}
    )
    again = [USER, *turn("c", "one"), *turn("c", "two"), told_too]
    assert "the tool call 'c' has two results" in await refused(gateway, {"messages": again})
    for none in ("", "null"):  # the latter is what Mistral's SDK writes
        (asked, told), (asked_too, told_too) = turn(none, "one"), turn(none, "two")
        both = {**asked, "tool_calls": [*asked["tool_calls"], *asked_too["tool_calls"]]}
        await answered(gateway, {"messages": [USER, both, told, told_too]})


async def test_an_id_of_messages_may_come_back_as_well(gateway: LiveGateway) -> None:
    def used(result: str) -> list[Any]:
        return [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_0", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_0", "content": result}]},
        ]

    assert "two" in await prompt(gateway, [USER, *used("one"), *used("two")], "messages", tools=TOOLS["messages"])


EMPTY: list[Any] = ["", " \n", "null", None, "{}", {}, [], "[]", '"null"', '" "']


@pytest.mark.parametrize("arguments", EMPTY, ids=repr)
async def test_empty_arguments_are_an_empty_object(gateway: LiveGateway, arguments: Any) -> None:
    text = await prompt(gateway, [USER, *turn("c", "x", arguments=arguments)], tools=TOOLS["chat/completions"])
    assert '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", ["", None, {}], ids=repr)
async def test_empty_arguments_of_a_responses_call_are_an_empty_object(gateway: LiveGateway, arguments: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    items = [USER, call, {"type": "function_call_output", "call_id": "c", "output": None}]
    transition = await answered(gateway, {"input": items, "tools": TOOLS["responses"]}, "responses")
    assert '{"name": "look", "arguments": {}}' in gateway.engine.tokenizer.decode(transition.prompt_ids)


async def test_a_responses_call_with_an_empty_id_is_answered_in_its_order(gateway: LiveGateway) -> None:
    calls = [{"type": "function_call", "call_id": "", "name": "look", "arguments": "{}"}] * 2
    results = [{"type": "function_call_output", "call_id": "", "output": output} for output in ("one", "two")]
    call = await answered(gateway, {"input": [USER, *calls, *results], "tools": TOOLS["responses"]}, "responses")
    text = gateway.engine.tokenizer.decode(call.prompt_ids)
    assert text.index("<tool_response>\none\n") < text.index("two\n</tool_response>")


DOCUMENTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "it rains"}}, ("it rains",)),
    (
        {"type": "document", "title": "Rain", "context": "of 1999", "source": {"type": "text", "data": "wet"}},
        ("Rain", "of 1999", "wet"),
    ),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "dry"}]}}, ("dry",)),
    ({"type": "document", "source": {"type": "content", "content": "dry"}}, ("dry",)),
    (
        {
            "type": "search_result",
            "source": "https://a.b",
            "title": "Sun",
            "content": [{"type": "text", "text": "hot"}],
        },
        ("https://a.b", "Sun", "hot"),
    ),
]


@pytest.mark.parametrize(("block", "texts"), DOCUMENTS, ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_the_text_of_a_document_is_read(
    gateway: LiveGateway, path: str, block: dict[str, Any], texts: tuple[str, ...]
) -> None:
    before, after = {"type": "text", "text": "Before."}, {"type": "text", "text": "After."}
    text = await prompt(gateway, [{"role": "user", "content": [before, block, after]}], path)
    places = [text.index(part) for part in ("Before.", *texts, "After.")]
    assert all(text[place - 1] == "\n" for place in places), text
    assert places[0] == min(places) and places[-1] == max(places)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]}
    if path == "messages":
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
        assert texts[-1] in await prompt(gateway, [USER, use, result], path, tools=TOOLS[path])


PICTURES: list[dict[str, Any]] = [
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="}},
    {"type": "document", "source": {"type": "url", "url": "https://a.b/c.pdf"}},
    {"type": "document", "source": {"type": "file", "file_id": "f"}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
    {"type": "document"},
    {"type": "search_result", "content": [{"type": "image"}]},
]


@pytest.mark.parametrize("block", PICTURES, ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_document_that_is_no_text_is_refused(gateway: LiveGateway, path: str, block: dict[str, Any]) -> None:
    sentence = await refused(gateway, {"messages": [{"role": "user", "content": [block]}]}, path)
    assert "messages[0]" in sentence and "reads text" in sentence


async def test_an_assistant_that_refused_said_so(gateway: LiveGateway) -> None:
    said = {"role": "assistant", "content": None, "refusal": "I may not."}
    assert "I may not." in await prompt(gateway, [USER, said, USER])


THOUGHTS: list[dict[str, Any]] = [
    {"reasoning_content": "because"},
    {"reasoning": "because"},
    {"reasoning": "because", "reasoning_content": "because"},
    {"reasoning": "because", "reasoning_content": None},
    {"reasoning": {"text": "because"}},
    {"reasoning_content": [{"type": "text", "text": "because"}]},
    {"reasoning_text": "because"},
    {"thinking": "because"},
    {"thinking_blocks": [{"type": "thinking", "thinking": "because", "signature": "s"}]},
    {
        "content": [
            {"type": "reasoning_content", "reasoning_content": {"text": "because"}},
            {"type": "text", "text": "x"},
        ]
    },
    {"reasoning_details": [{"type": "reasoning.text", "text": "be"}, {"type": "reasoning.text", "text": "cause"}]},
    {"content": [{"type": "thinking", "thinking": "because", "signature": "s"}, {"type": "text", "text": "x"}]},
    {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "because"}]},
            {"type": "text", "text": "x"},
        ]
    },
    {
        "content": [
            {"type": "reasoning", "text": "because"},
            {"type": "redacted_thinking", "data": "QQ=="},
            {"type": "text", "text": "x"},
        ]
    },
]


@pytest.mark.parametrize("said", THOUGHTS, ids=str)
async def test_reasoning_is_read_under_each_of_its_names(tmp_path: Path, said: dict[str, Any]) -> None:
    thinks = "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    template = CHATML_TEMPLATE.replace(
        "message.role + '\\n' + message.content }}", f"message.role + '\\n' }}}}{thinks}{{{{- message.content }}}}"
    )
    async with live_gateway(tmp_path, engine=ScriptedEngine(tiny_tokenizer(chat_template=template))) as gateway:
        text = await prompt(gateway, [USER, {"role": "assistant", "content": "x", **said}, USER])
        assert text.count("<think>because</think>x") == 1


@pytest.mark.parametrize(
    "said",
    [{"reasoning": {"effort": "low"}}, {"reasoning": ""}, {"reasoning_details": [{"type": "reasoning.encrypted"}]}],
    ids=str,
)
async def test_reasoning_that_is_no_text_is_none(gateway: LiveGateway, said: dict[str, Any]) -> None:
    plain = await prompt(gateway, [USER, {"role": "assistant", "content": "x"}, USER])
    assert await prompt(gateway, [USER, {"role": "assistant", "content": "x", **said}, USER]) == plain
