"""Growing histories stay prefixes, id for id, whatever is in them; streamed text is the whole text; no request
crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightningrl.errors import ConfigError
from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.chat import parse_chat_request
from lightningrl_server.gateway.history import History, PastCall, chain_digests, digest_tools, extend_digest
from lightningrl_server.gateway.prompt import as_ids
from lightningrl_server.gateway.request import Refusal
from lightningrl_server.rendering.completion import Choice, CompletionText
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer(words=[" SELECT", " FROM"])
GENERIC = PolicyRenderer(TOKENIZER)
QWEN = PolicyRenderer(TOKENIZER, "qwen3")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
arguments = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers() | texts | st.lists(texts, max_size=2), max_size=3
)
schemas = st.lists(
    st.builds(
        lambda name, properties: {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        },
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.dictionaries(texts, st.just({"type": "string"}), max_size=2),
    ),
    max_size=2,
    unique_by=lambda tool: str(tool["function"]["name"]),  # type: ignore[index]
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
            ["<think>hm</think>", "<tool_call>", "</tool_call>", "<think>", " ", "\n", "<", "\ufffd", "🙂"]
        ),
    ),
    max_size=4,
).map("".join)
followers = st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), texts), min_size=1, max_size=3)


def sample(renderer: PolicyRenderer, prompt: tuple[int, ...], ids: list[int], tools: bool) -> Choice:
    text = CompletionText(renderer, prompt, allow_tools=tools)
    text.push(ids, [0.0] * len(ids), stream=False)
    return text.finish(FinishReason.STOP)[0]


def asking(arguments: str) -> bytes:
    """Digest of a history that ends in a tool call with these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]}
    return chain_digests(parse_chat_request(json.dumps(body).encode(), max_choices=1).call.messages)[-1]


def test_a_number_is_the_same_however_a_client_spells_it() -> None:
    said = '{"amount": 20.0, "limit": 1e3, "of": [{"rate": -0.0}, 0.5, 1e22], "is": true}'
    assert asking(said) == asking('{"amount":20,"limit":1000,"of":[{"rate":0},0.5,1e+22],"is":true}'), (
        "as JavaScript writes it"
    )
    for other in (
        said.replace("20.0", "20.5"),
        said.replace("20.0", '"20"'),
        said.replace("true", "1"),
        said.replace("1e3", "1001"),
    ):
        assert asking(other) != asking(said)


@settings(deadline=None, max_examples=60)
@given(
    renderer=st.sampled_from([GENERIC, QWEN]),
    first=texts,
    tools=schemas,
    turns=st.lists(st.tuples(answers, st.booleans(), followers), min_size=1, max_size=4),
)
def test_a_growing_history_never_breaks(
    renderer: PolicyRenderer, first: str, tools: list[Any], turns: list[tuple[str, bool, list[tuple[str, str]]]]
) -> None:
    history = History()
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    prompt = renderer.render(messages, tools)
    for number, (said, ends, new) in enumerate(turns):
        completion = TOKENIZER.encode(said, add_special_tokens=False) + ([TOKENIZER.eos_token_id] if ends else [70])
        choice = sample(renderer, prompt, completion, bool(tools))
        digest = chain_digests(messages)[-1]
        answer = choice.as_message()
        history.add(
            PastCall(str(number), as_ids(prompt), as_ids(completion), digest_tools(tools)),
            digest,
            extend_digest(digest, answer),
        )
        # The agent sends it back over the wire, as SDKs do.
        echoed = {"role": "assistant", "content": choice.content or None, "refusal": None}
        if choice.tool_calls:
            echoed["tool_calls"] = [  # type: ignore[assignment]
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), indent=1)},
                }
                for call in choice.tool_calls
            ]
        wire = [*messages, echoed]
        wire += [{"role": role, "content": content, "tool_call_id": "c"} for role, content in new]
        call = parse_chat_request(
            json.dumps({"messages": [unparsed(m) for m in wire], "tools": tools}).encode(), max_choices=1
        ).call
        match = history.match(call.messages, chain_digests(call.messages), digest_tools(call.tools))
        assert match.call is not None and match.call.id == str(number) and not match.is_break
        suffix = renderer.bridge(prompt, completion, call.messages[match.covered :], tools)
        assert suffix is not None
        assert TOKENIZER.decode(list(suffix)).endswith("<|im_start|>assistant\n")
        for _, content in new:
            assert content in TOKENIZER.decode(list(suffix))
        messages = list(call.messages)  # type: ignore[arg-type]
        prompt = (*prompt, *completion, *suffix)


def unparsed(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    back = [
        {
            **c,
            "function": {
                **c["function"],
                "arguments": a if isinstance(a := c["function"]["arguments"], str) else json.dumps(a),
            },
        }
        for c in calls
    ]
    return {**message, "tool_calls": back}


@settings(deadline=None, max_examples=80)
@example(
    renderer=QWEN,
    said='<think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>0</think>',
    tools=True,
    stop=[],
    size=1,
)
@example(
    renderer=QWEN,
    said='<think> 0<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    tools=False,
    stop=[],
    size=1,
)
@given(
    renderer=st.sampled_from([GENERIC, QWEN]),
    said=answers,
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(["a", "END", " ", "🙂"]), max_size=2),
    size=st.integers(1, 5),
)
def test_streamed_text_is_the_whole_text(
    renderer: PolicyRenderer, said: str, tools: bool, stop: list[str], size: int
) -> None:
    ids = [*TOKENIZER.encode(said, add_special_tokens=False), TOKENIZER.eos_token_id]
    whole = CompletionText(renderer, (1, 2), allow_tools=tools, stop=stop)
    whole.push(ids, [0.0] * len(ids), stream=False)
    expected = whole.finish(FinishReason.STOP)[0]
    text = CompletionText(renderer, (1, 2), allow_tools=tools, stop=stop)
    deltas = [
        text.push(ids[i : i + size], [0.0] * len(ids[i : i + size]), stream=True) for i in range(0, len(ids), size)
    ]
    choice, last = text.finish(FinishReason.STOP)
    seen = [delta for delta in (*deltas, last) if delta is not None]
    assert "".join(delta.content for delta in seen) == choice.content == expected.content
    assert "".join(delta.reasoning for delta in seen) == expected.reasoning
    assert [call.name for delta in seen for _, call in delta.tool_calls] == [call.name for call in expected.tool_calls]
    assert [i for delta in seen for i in delta.token_ids] == ids


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        "messages",
        "tools",
        "n",
        "stop",
        "tool_choice",
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
    ]
)
shaped = st.recursive(
    anything, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(fields, inner, max_size=4), max_leaves=8
)


@settings(deadline=None, max_examples=150)
@given(
    body=shaped
    | st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": shaped}),
                max_size=3,
            )
        }
    )
)
def test_no_body_crashes_the_parser_or_the_template(body: Any) -> None:
    try:
        call = parse_chat_request(json.dumps(body).encode(), max_choices=4).call
        chain_digests(call.messages)
        GENERIC.render(call.messages, call.tools)
    except (Refusal, ValueError) as error:
        assert str(error)


def test_bridged_turns_are_what_the_template_writes() -> None:
    """Where the model spoke canonically, bridging and rendering in full agree token for token."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for answer, new in (
        ({"role": "assistant", "content": "Hello."}, [{"role": "user", "content": "More"}]),
        (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            [{"role": "tool", "content": "r", "tool_call_id": "c"}] * 2,
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [call]},
            [{"role": "tool", "content": "r"}, {"role": "user", "content": "u"}],
        ),
    ):
        start = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        prompt = GENERIC.render(start, tools)
        full = GENERIC.render([*start, answer, *new], tools)
        said = full[len(prompt) : full.index(TOKENIZER.eos_token_id, len(prompt)) + 1]
        assert (*prompt, *said, *(GENERIC.bridge(prompt, said, new, tools) or ())) == full


def test_a_tokenizer_without_a_template_is_refused_at_once(tmp_path: Path) -> None:
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"bare' has no chat template, so messages cannot become its prompt"):
        PolicyRenderer(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty' has no tokenizer.json"):
        PolicyRenderer(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"no renderer 'nonsense'; there are auto, default, .*qwen3"):
        PolicyRenderer(tiny_tokenizer(), "nonsense")


def test_a_saved_tokenizer_renders_alike_and_torch_stays_out(tmp_path: Path) -> None:
    tiny_tokenizer(words=[" SELECT", " FROM"]).save_pretrained(tmp_path)
    code = (
        "import sys, json; from lightningrl_server.rendering.renderer import PolicyRenderer\n"
        "import lightningrl_server.gateway.app\n"
        "ids = PolicyRenderer(sys.argv[1]).render([{'role': 'user', 'content': 'a SELECT b'}], None)\n"
        "print(json.dumps([list(ids), sorted({'torch', 'langchain', 'verl', 'ray'} & set(sys.modules))]))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert json.loads(out.splitlines()[-1]) == [
        list(GENERIC.render([{"role": "user", "content": "a SELECT b"}], None)),
        [],
    ]


def test_a_policy_without_readable_tool_markup_says_so() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    assert not PolicyRenderer(tiny_tokenizer(chat_template=plain)).supports_tools
    assert GENERIC.supports_tools


@pytest.mark.parametrize(
    ("opened", "is_thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_reasoning_that_the_prompt_opened_and_closed_is_over(opened: str, is_thinking: bool) -> None:
    prompt = TOKENIZER.encode("<|im_start|>assistant\n" + opened)
    assert GENERIC.is_thinking(TOKENIZER.encode("so"), prompt) is is_thinking
    assert GENERIC.is_thinking(TOKENIZER.encode("so</think>"), prompt) is False
    assert (GENERIC.open_call(prompt, None) is None) is is_thinking
