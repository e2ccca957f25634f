"""Small policies from demonstrations: they answer as shown, and are shown what the gateway renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_torch.cold_start import (
    NUMBERS,
    Demonstration,
    build_model,
    build_tokenizer,
    cold_start,
    encode,
    write_policy,
)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a plus b", "parameters": {"type": "object", "properties": {}}},
    }
]


def call(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


def sums(arguments: str = '{"a": 1, "b": 2}') -> tuple[Demonstration, Demonstration]:
    """The call that asks for the tool, and the one that sees its result."""
    asked = [{"role": "user", "content": "1 and 2?"}, call(arguments)]
    seen = [*asked, {"role": "tool", "content": "3", "tool_call_id": "1"}, {"role": "assistant", "content": "It is 3."}]
    return Demonstration(messages=asked, tools=TOOLS), Demonstration(messages=seen, tools=TOOLS)


def says(text: str, answer: str) -> Demonstration:
    return Demonstration(messages=[{"role": "user", "content": text}, {"role": "assistant", "content": answer}])


def test_what_is_demonstrated_is_what_the_gateway_renders_and_bridges() -> None:
    asked, seen = sums()
    tokenizer = build_tokenizer([asked, seen], common=1)
    renderer = PolicyRenderer(tokenizer)
    first, first_prompt = encode(asked, tokenizer)
    second, second_prompt = encode(seen, tokenizer)
    prompt, completion = tuple(first[:first_prompt]), tuple(first[first_prompt:])

    assert renderer.render(seen.messages[:1], TOOLS) == prompt
    parsed = renderer.parse(completion, prompt).tool_calls[0]
    assert (parsed.name, parsed.arguments) == ("add", {"a": 1, "b": 2})
    bridged = renderer.bridge(prompt, completion, seen.messages[2:3], TOOLS)
    assert bridged is not None
    assert [*prompt, *completion, *bridged] == second[:second_prompt]
    assert renderer.parse(second[second_prompt:], second[:second_prompt]).content == "It is 3."


def test_malformed_arguments_are_demonstrated_as_they_are() -> None:
    asked, _ = sums(arguments='{"a": 1,')
    tokenizer = build_tokenizer([asked], common=1)
    ids, prompt = encode(asked, tokenizer)
    assert (
        tokenizer.decode(ids[prompt:]) == '<tool_call>\n{"name": "add", "arguments": {"a": 1,}\n</tool_call><|im_end|>'
    )


def test_common_words_are_tokens_and_any_text_round_trips() -> None:
    tokenizer = build_tokenizer([says("name the capital", "Rome")] * 20)
    assert len(tokenizer.encode("name the capital")) == 3
    for text in ("Grüße \t\n 'don't' 3.14 日本語 \U0001f600 <b>", "", json.dumps({"a": [1]})):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_phrases_are_single_tokens_and_change_no_text() -> None:
    asked, seen = sums()
    texts = ['{"name": "add", "arguments": {"a": ', "<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools>"]
    tokenizer = build_tokenizer([asked, seen], phrases=texts, common=1)
    assert [len(tokenizer.encode(text)) for text in texts] == [1, 1]
    renderer = PolicyRenderer(tokenizer)
    ids, prompt = encode(seen, tokenizer)
    assert list(renderer.render(seen.messages[:-1], TOOLS)) == ids[:prompt]
    ids, prompt = encode(asked, tokenizer)
    assert renderer.parse(ids[prompt:], ids[:prompt]).tool_calls[0].arguments == {"a": 1, "b": 2}
    assert tokenizer.decode(ids) == build_tokenizer([]).decode(encode(asked, build_tokenizer([]))[0])


def test_a_number_can_be_one_token_wherever_it_stands() -> None:
    tokenizer = build_tokenizer([says("12 and 12", "12")] * 20, words=NUMBERS)
    twelve = tokenizer.encode("12")
    assert len(twelve) == 1
    assert [part for part in tokenizer.encode("12, 12\n(12)") if part in twelve] == twelve * 3


def test_a_policy_answers_as_the_last_phase_shows(tmp_path: Path) -> None:
    questions = {f"what is letter {number}": chr(97 + number) for number in range(4)}
    wrong, right = (
        [says(text, answer) for text, answer in pairs.items()] for pairs in (dict.fromkeys(questions, "z"), questions)
    )
    tokenizer = build_tokenizer([*wrong, *right] * 10, context_length=64)
    model = build_model(tokenizer, width=32, layers=1)
    cold_start(model, tokenizer, [wrong * 20, right * 500], peak_learning_rate=2e-2, batch_tokens=128)
    write_policy(tmp_path / "policy", model, tokenizer)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    renderer = PolicyRenderer(tmp_path / "policy")
    for text, answer in questions.items():
        prompt = renderer.render([{"role": "user", "content": text}], None)
        scores = loaded(input_ids=loaded.dummy_inputs["input_ids"].new_tensor([prompt])).logits[0, -1]
        assert renderer.decode([int(scores.argmax())]) == answer


def test_calls_of_one_conversation_are_computed_at_once_and_learned_alike() -> None:
    asked, seen = sums()
    tokenizer = build_tokenizer([asked, seen], common=1)
    together, apart = (build_model(tokenizer, width=32, layers=1) for _ in range(2))
    losses = [cold_start(together, tokenizer, [[asked, seen]]), cold_start(apart, tokenizer, [[seen, asked]])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for left, right in zip(together.parameters(), apart.parameters(), strict=True):
        assert left.allclose(right, atol=1e-5)


def test_one_seed_makes_the_same_weights() -> None:
    demonstrations = sums() * 3
    tokenizer = build_tokenizer(demonstrations)
    models = [build_model(tokenizer, width=32, layers=1, seed=seed) for seed in (1, 1, 2)]
    losses = [cold_start(model, tokenizer, [demonstrations], seed=1) for model in models]
    assert losses[0] == losses[1] != losses[2]
    weights = [next(iter(model.parameters())) for model in models]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_demonstrations_that_cannot_be_learned_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="ends with the assistant's answer"):
        Demonstration(messages=[{"role": "user", "content": "hello"}])
    tokenizer = build_tokenizer([says("hello", "hello")], context_length=16)
    with pytest.raises(ValueError, match="multiple of 32"):
        build_model(tokenizer, width=48)
    model = build_model(tokenizer, width=32, layers=1)
    with pytest.raises(ValueError, match="the model's context"):
        cold_start(model, tokenizer, [[says("hello " * 20, "hello")]])
    with pytest.raises(ValueError, match="has 0 tokens"):
        cold_start(model, tokenizer, [])
