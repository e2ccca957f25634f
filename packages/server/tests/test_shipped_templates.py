"""The chat templates that come with the package: what each writes, that its turns end, and which model is told of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from model_families import FAMILIES, SHIPPED_FAMILIES, Family, build_tokenizer

from lightningrl.errors import ConfigError
from lightningrl_runs.segments import SegmentKind, SegmentReader
from lightningrl_server.rendering.renderer import PolicyRenderer

TOOLS: Any = [
    {"type": "function", "function": {"name": "price", "description": "d", "parameters": {"type": "object"}}},
]
SYSTEM: Any = {"role": "system", "content": "Be brief."}
USER: Any = {"role": "user", "content": "What costs tea?"}
SURE: Any = {"role": "user", "content": "Sure?"}
RESULTS: Any = [
    {"role": "tool", "tool_call_id": f"call_{place}", "name": "price", "content": result}
    for place, result in enumerate(("3 €", "free"))
]
ASKED: Any = [("price", {"of": "tea"}), ("price", {"of": "air"})]
by_name = pytest.mark.parametrize("family", SHIPPED_FAMILIES, ids=lambda family: family.name)


def answer(content: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    asked = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": asked} if asked else {})}


@by_name
def test_all_parts_of_a_conversation_are_written_in_order_and_read_back_into_roles(family: Family) -> None:
    tokenizer = build_tokenizer(family)
    renderer = PolicyRenderer(tokenizer)
    history = [SYSTEM, USER, answer("Look.", *ASKED), *RESULTS, answer("It costs 3 €."), SURE]
    ids = renderer.render(history, TOOLS)
    text = renderer.decode(ids)
    assert text.startswith("<s>") or family.name == "shipped-chatml", "no tokenizer adds it beside a template"
    words = ("Be brief.", "What costs tea?", "Look.", '"tea"', '"air"', "3 €", "free", "It costs", "Sure?")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert text.count('"description"') == 1
    segments, _ = SegmentReader(tokenizer).read(ids, renderer.tokenizer.encode("Yes."), kind=SegmentKind.MARKUP)
    kinds = {word: segment.kind for segment in segments for word in (*words, "Yes.") if word in segment.text}
    assert SegmentKind.UNKNOWN not in {segment.kind for segment in segments}
    assert (kinds["Look."], kinds["It costs"], kinds["Yes."]) == (SegmentKind.ASSISTANT,) * 3
    assert (kinds["Sure?"], kinds["free"]) == (SegmentKind.USER, SegmentKind.TOOL_RESULT)


@by_name
def test_later_prompts_begin_with_earlier_ones_and_what_was_sampled(family: Family) -> None:
    """Also as the template itself writes them: what is rendered anew is what was joined."""
    assert family.write is not None
    renderer = PolicyRenderer(build_tokenizer(family))
    history: list[Any] = [SYSTEM, USER]
    prompt = renderer.render(history, TOOLS)
    said = ("" if family.name == "shipped-mistral" else "Look.\n") + family.write(ASKED)
    for text, calls, news in ((said, ASKED, RESULTS), ("It costs 3 €.", [], [SURE]), ("Yes.", [], [USER])):
        completion = (*renderer.tokenizer.encode(text), renderer.stop_token_ids[0])
        parsed = renderer.parse(completion, prompt)
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
        suffix = renderer.bridge(prompt, completion, news, TOOLS)
        assert suffix is not None
        history += [answer(parsed.content, *calls), *news]
        whole = (*prompt, *completion, *suffix)
        anew = re.sub(r', "id": "\d{9}"', "", renderer.decode(renderer.render(history, TOOLS)))  # Mistral's own
        assert anew == renderer.decode(whole)
        prompt = whole


@by_name
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_no_system_message_is_lost_wherever_it_stands(family: Family, tools: Any) -> None:
    renderer = PolicyRenderer(build_tokenizer(family))
    later: Any = {"role": "system", "content": "Now in French."}
    for messages in ([SYSTEM], [SYSTEM, answer("Hello."), USER], [SYSTEM, USER, answer("3 €"), later, SURE]):
        text = renderer.decode(renderer.render(messages, tools))
        for message in messages:
            assert text.count(message["content"]) == 1


@by_name
def test_the_token_that_ends_a_turn_stops_sampling(family: Family) -> None:
    renderer = PolicyRenderer(build_tokenizer(family))
    ids = renderer.render([USER, answer("It costs 3 €."), SURE], None)
    text = renderer.decode(ids)
    after = renderer.tokenizer.encode(text[text.index("3 €.") + len("3 €.") :])
    assert after[0] in renderer.stop_token_ids


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_model_without_a_template_is_told_the_one_that_fits_its_tokens(family: Family) -> None:
    tokenizer = build_tokenizer(family)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError) as caught:
        PolicyRenderer(tokenizer, name="p")
    sentence = str(caught.value)
    tokens = {family.eos, *family.tokens}
    fitting = {
        "<|im_start|>": "chatml",
        "<start_of_turn>": "gemma",
        "<|start_header_id|>": "llama",
        "[INST]": "mistral",
    }
    names = [name for token, name in fitting.items() if token in tokens]
    assert sentence.startswith("policy 'p' has no chat template, so messages cannot become its prompt; set policy.")
    for name in fitting.values():
        assert (f"policy.chat_template = '{name}' or" in sentence) == (name in names)
    assert ("the tokens of none of the shipped ones: chatml, gemma, hermes, llama, mistral" in sentence) == (not names)
