"""Each family's tool calls by its own template: messages to tokens and back, in any chunks, over five turns without a
break."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, SHIPPED_FAMILIES, Family, build_tokenizer
from openai import AsyncOpenAI

from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_server.rendering.completion import Choice, CompletionText
from lightningrl_server.rendering.markups import MARKUPS, read_text
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine

USER: Any = {"role": "user", "content": "hi"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "clock")
]
CALLS = [("weather", {"city": 'Zü"rich]', "days": 2}), ("clock", {"city": "a\nb"})]
SPEAKING = [family for family in (*FAMILIES, *SHIPPED_FAMILIES) if family.write is not None]
by_name = pytest.mark.parametrize("family", SPEAKING, ids=lambda family: family.name)


@cache
def renderer_of(family: Family) -> PolicyRenderer:
    return PolicyRenderer(build_tokenizer(family), name=family.name)


def said(family: Family, text: str, calls: list[tuple[str, Any]], after: str = "") -> str:
    """What the model says, without the token that ends it."""
    assert family.write is not None
    if not family.with_text:
        return family.write(calls)
    return f"{text}\n{family.write(calls)}{after}"


def read(family: Family, text: str, *, chunk: int | None = None, tools: bool = True) -> tuple[Choice, str]:
    """The choice, and all content that its deltas showed; `chunk`: tokens that come at once, None = all."""
    renderer = renderer_of(family)
    ids = renderer.tokenizer.encode(text)
    completion = CompletionText(renderer, renderer.render([USER], TOOLS), allow_tools=tools)
    shown = ""
    for start in range(0, len(ids), chunk or len(ids)):
        part = ids[start : start + (chunk or len(ids))]
        delta = completion.push(part, [0.0] * len(part), stream=chunk is not None)
        shown += delta.content if delta is not None else ""
    choice, last = completion.finish(FinishReason.STOP)
    return choice, shown + last.content


def asked(choice: Choice) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in choice.tool_calls]


def end_of(family: Family) -> str:
    return family.eos if family.call_end is None else family.call_end


@pytest.mark.parametrize("family", (*FAMILIES, *SHIPPED_FAMILIES), ids=lambda family: family.name)
def test_a_familys_markup_is_told_by_its_template(family: Family) -> None:
    renderer = renderer_of(family)
    assert (renderer._markup.name if renderer._markup else None) == family.markup
    assert renderer.supports_tools == (family.markup is not None)


@by_name
def test_parallel_calls_are_read_the_same_whole_and_in_any_chunks(family: Family) -> None:
    text = said(family, "Let me look.", CALLS)
    whole, content = read(family, text + end_of(family))
    assert asked(whole) == CALLS
    assert whole.content == content == ("Let me look." if family.with_text else "")
    assert (family.markup == "gpt-oss") == (whole.reasoning == "hm")
    for chunk in (*range(1, 12), 17, 40):
        streamed, shown = read(family, text + end_of(family), chunk=chunk)
        assert (asked(streamed), streamed.content, shown) == (CALLS, content, content), chunk


@by_name
def test_text_after_calls_is_kept(family: Family) -> None:
    if not family.with_text:
        pytest.skip("its format has no room for text")
    text = said(family, "Look.", CALLS[:1], "\nDone [1].") + family.eos
    for chunk in (None, 1, 7):
        choice, shown = read(family, text, chunk=chunk)
        assert asked(choice) == CALLS[:1]
        assert choice.content == shown == "Look.\nDone [1]."


@by_name
def test_a_call_that_is_cut_off_or_broken_is_text_and_no_error(family: Family) -> None:
    text = said(family, "Look.", CALLS[:1])
    for broken in (
        text[: text.index("days")],
        text.replace("weather", "").replace(": ", ":: "),
        text[: len(text) // 2],
    ):
        whole, shown = read(family, broken)
        assert whole.tool_calls == () and shown == whole.content
        kept = "".join(whole.content.split())
        lost = [part for part in ("Look.", "city", "rich") if part in broken and part not in kept]
        assert not lost, whole.content
        for chunk in (1, 2, 3, 5, 8, 13):
            streamed, shown = read(family, broken, chunk=chunk)
            assert (streamed.content, shown, streamed.tool_calls) == (whole.content, whole.content, ())


@by_name
def test_a_plain_answer_streams_as_it_comes(family: Family) -> None:
    text = family.plain("It is 7 [of 9] {so} <b>far</b>;\n\nand more.")
    choice, shown = read(family, text + family.eos, chunk=1)
    assert choice.content == shown == "It is 7 [of 9] {so} <b>far</b>;\n\nand more."
    renderer = renderer_of(family)
    completion, early = CompletionText(renderer, renderer.render([USER], TOOLS), allow_tools=True), ""
    for token in renderer.tokenizer.encode(text):
        delta = completion.push([token], [0.0], stream=True)
        early += delta.content if delta is not None else ""
    assert early.startswith("It is 7 [of 9] {so}"), "a client waits for its end"


@by_name
def test_without_tools_markup_is_content(family: Family) -> None:
    choice, shown = read(family, said(family, "", CALLS) + end_of(family), chunk=1, tools=False)
    assert choice.tool_calls == () and choice.content == shown and "city" in shown


@by_name
async def test_five_turns_of_calls_join_without_a_break(family: Family, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(family)
    engine, renderer = ScriptedEngine(tokenizer), renderer_of(family)
    both = CALLS[:1] if family.markup == "gpt-oss" else CALLS  # whose call ends the turn
    turns = [CALLS[:1], both, CALLS[:1], CALLS[1:]]
    said_turns = [said(family, "Look.", calls) + end_of(family) for calls in turns] + [
        family.plain("done") + family.eos
    ]
    engine.enqueue(*said_turns, ends=False)
    async with live_gateway(tmp_path, engine=engine, renderer=renderer) as gateway:
        attempt = await gateway.attempt(sampling=SamplingSettings(max_tokens=2048))
        messages: list[Any] = [USER]
        if family.takes_system:
            messages.insert(0, {"role": "system", "content": "be brief"})
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            for number, calls in enumerate([*turns, []]):
                answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=False)
                message = answer.choices[0].message
                functions = [call.function for call in message.tool_calls or []]  # type: ignore[union-attr]
                assert [(each.name, json.loads(each.arguments)) for each in functions] == calls
                messages.append(message.model_dump(exclude_none=True))
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": f"result{number}{place}"}
                    for place, call in enumerate(message.tool_calls or [])
                ]
        transitions = await attempt.transitions()
    for number, (before, after) in enumerate(pairwise(transitions)):
        assert after.parent_id == before.id and not after.is_break
        past = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(past)] == past
        new = tokenizer.decode(after.prompt_ids.tolist()[len(past) :])
        assert all(f"result{number}{place}" in new for place in range(len(turns[number])))
        assert family.write is None or "weather" not in new.replace("functions.weather", ""), new


@by_name
def test_a_history_that_the_policy_did_not_sample_is_rendered_with_its_calls(family: Family) -> None:
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": values}}
        for place, (name, values) in enumerate([CALLS[0], ("clock", {"city": "ab"})])
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "name": CALLS[n][0], "content": f"r{n}"} for n in (0, 1)]
    history = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    text = renderer_of(family).decode(renderer_of(family).render(history, TOOLS))
    for part in ("weather", "clock", "rich]", "r0", "r1"):
        assert part in text


@pytest.mark.parametrize("markup", [markup for markup in MARKUPS if markup.read], ids=lambda markup: markup.name)
def test_no_text_makes_a_reader_fail(markup: Any) -> None:
    marks = [
        *markup.tokens,
        "{",
        "[",
        "}",
        "]",
        '"',
        "f(",
        "x=1",
        '{"name": "f", "arguments": {"a": 1}}',
        "\n",
        " to=",
        "{" * 3000,
        "[f(" * 400,
    ]
    for first in marks:
        for second in marks:
            for third in marks[-6:]:
                text = f"{first}{second}{third}"
                whole = read_text(markup, text)
                assert all(isinstance(call.arguments, dict) for call, _ in whole.calls)
                early = read_text(markup, text, final=False)
                assert whole.content.startswith(early.content.rstrip()), text
                assert whole.calls[: len(early.calls)] == early.calls
