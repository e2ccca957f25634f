"""Chat templates as they come: with switches, strict about turns, broken, without tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.errors import ConfigError
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer

USER: Any = {"role": "user", "content": "hi"}
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
SWITCHED = CHATML_TEMPLATE.replace(
    PROMPT,
    PROMPT
    + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)
CLOSED = "<think>\n\n</think>\n\n"
STRICT = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


FORGETFUL = """
{%- if messages[0].role == 'system' %}{%- set head = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- for message in turns %}
    {%- if message.role == 'user' %}{{- '[INST] ' + (head + ' ' if loop.first and head is defined else '') + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""
"""Llama 2's kind: a role that it does not know is passed over."""


def text(renderer: PolicyRenderer, messages: list[Any]) -> str:
    return renderer.decode(renderer.render(messages, None))


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_template_kwargs_reach_each_prompt_and_each_turn_that_follows() -> None:
    tokenizer = tiny_tokenizer(chat_template=SWITCHED)
    thinks, plain = PolicyRenderer(tokenizer), PolicyRenderer(tokenizer, template_kwargs={"enable_thinking": False})
    assert text(plain, [USER]) == text(thinks, [USER]) + CLOSED
    past, answer = plain.render([USER], None), tuple(tokenizer.encode("x<|im_end|>", add_special_tokens=False))
    suffix = plain.bridge(past, answer, [USER], None)
    assert suffix is not None and plain.decode(suffix).endswith(f"<|im_start|>assistant\n{CLOSED}")


def test_a_familys_renderer_takes_its_own_switches() -> None:
    renderer = PolicyRenderer(tiny_tokenizer(), "qwen3", template_kwargs={"enable_thinking": False})
    assert text(renderer, [USER]).endswith(CLOSED)
    assert renderer.unlike({"enable_thinking": False}) == []
    assert renderer.unlike({"enable_thinking": True}) == ["enable_thinking"]
    assert PolicyRenderer(tiny_tokenizer(), "qwen3").unlike({"enable_thinking": True}) == [], "its default"


@pytest.mark.parametrize(
    ("kwargs", "renderer", "sentence"),
    [
        ({"enable_thinkng": False}, "auto", "never reads 'enable_thinkng'; it reads enable_thinking"),
        ({"tools": []}, "auto", "each call gives the chat template of policy 'p' its own tools"),
        (
            {"thinking": False},
            "qwen3",
            "the renderer 'qwen3' of policy 'p' never reads 'thinking'; it reads enable_thinking",
        ),
    ],
)
def test_a_template_kwarg_that_nobody_reads_is_refused_by_name(
    kwargs: dict[str, Any], renderer: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyRenderer(tiny_tokenizer(chat_template=SWITCHED), renderer, name="p", template_kwargs=kwargs)
    assert sentence in str(caught.value)


def test_a_template_that_does_not_compile_is_refused_with_its_line() -> None:
    with pytest.raises(
        ConfigError, match=r"the chat template of policy 'p' does not compile: .*\(line 2\); mend chat_template.jinja"
    ):
        PolicyRenderer(tiny_tokenizer(chat_template="{{ messages }}\n{% if %}"), name="p")
    with pytest.raises(ConfigError, match="does not compile: No filter named 'nonsense'"):
        PolicyRenderer(tiny_tokenizer(chat_template="{{ messages | nonsense }}"), name="p")
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert text(PolicyRenderer(tiny_tokenizer(chat_template=marked)), [USER]) == "hi"


@pytest.mark.parametrize("name", ["hermes", "Qwen3", ""])
def test_a_renderer_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"policy 'p': no renderer {name!r}; there are auto, default, .*llama-3, .*qwen3"
    ):
        PolicyRenderer(tiny_tokenizer(), name, name="p")


@pytest.mark.parametrize("name", ["llama-3", "gpt-oss", "deepseek-v4"])
def test_a_renderer_that_does_not_fit_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"renderer {name!r} does not fit the tokenizer of policy 'p': .*; those that fit are .*qwen3",
    ):
        PolicyRenderer(tiny_tokenizer(), name, name="p")


def test_a_system_message_that_a_template_passes_over_is_the_users() -> None:
    renderer = PolicyRenderer(tiny_tokenizer(chat_template=FORGETFUL))
    system: Any = {"role": "system", "content": "now be brief"}
    assert text(renderer, [system]) == "[INST] now be brief [/INST]"
    assert text(renderer, [system, USER]) == "[INST] now be brief hi [/INST]"
    past = [USER, said("x")]
    whole = text(renderer, [*past, system, USER])
    assert whole == "[INST] hi [/INST]x<|im_end|>[INST] now be brief\n\nhi [/INST]"
    suffix = renderer.bridge(
        renderer.render([USER], None), renderer.tokenizer.encode("x", add_special_tokens=False), [system, USER], None
    )
    assert suffix is not None and whole.endswith(renderer.decode(suffix))


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([{"role": "system", "content": "be brief"}, USER], ["user\nbe brief\n\nhi"]),
        ([USER, {"role": "user", "content": "there"}], ["user\nhi\n\nthere"]),
        ([USER, said("a"), said("b"), USER], ["user\nhi", "assistant\na\n\nb", "user\nhi"]),
        (
            [{"role": "system", "content": "s"}, USER, said("a"), {"role": "system", "content": "t"}, USER],
            ["user\ns\n\nhi", "assistant\na", "user\nt\n\nhi"],
        ),
    ],
)
def test_turns_are_joined_for_a_template_that_wants_them_to_alternate(messages: list[Any], turns: list[str]) -> None:
    renderer = PolicyRenderer(tiny_tokenizer(chat_template=STRICT))
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert text(renderer, messages).removeprefix(str(renderer.tokenizer.decode([]))).endswith(expected)
    suffix = renderer.bridge(
        renderer.render(messages, None), tuple(renderer.tokenizer.encode("x<|im_end|>")), [USER, USER], None
    )
    assert (
        suffix is not None
        and renderer.decode(suffix) == "\n<|im_start|>user\nhi\n\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_takes_a_conversation_gets_it_as_it_is() -> None:
    renderer = PolicyRenderer(tiny_tokenizer())
    assert text(renderer, [USER, USER]).count("<|im_start|>user\nhi<|im_end|>") == 2


def test_what_no_joining_mends_is_refused_with_a_remedy() -> None:
    renderer = PolicyRenderer(tiny_tokenizer(chat_template=STRICT), name="p")
    with pytest.raises(
        ValueError, match=r"roles must alternate.*; send turns of user and assistant that alternate, the user's first"
    ):
        renderer.render([said("a"), USER], None)


def test_arguments_that_a_template_cannot_go_through_are_named() -> None:
    goes_through = CHATML_TEMPLATE.replace(
        "call.function.arguments is string", "call.function.arguments.items() is string"
    )
    renderer = PolicyRenderer(tiny_tokenizer(chat_template=goes_through), name="p")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "here"}}
    with pytest.raises(
        ValueError, match="the arguments of a call of 'look' are no object but \"here\"; send an object"
    ):
        renderer.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER], None)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    tokenizer = tiny_tokenizer(chat_template=SWITCHED)
    renderer = PolicyRenderer(tokenizer, template_kwargs={"enable_thinking": False})
    async with live_gateway(tmp_path, engine=ScriptedEngine(tokenizer), renderer=renderer) as running:
        yield running


async def post(attempt: LiveAttempt, path: str, **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": [USER], "input": "hi", "max_tokens": 9, "max_output_tokens": 9, **more}
    async with httpx.AsyncClient() as client:
        return await client.post(
            f"{attempt.base_url}/{path}", json=body, headers={"authorization": f"Bearer {attempt.key}"}
        )


EQUAL: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"enable_thinking": False},
    {"chat_template_kwargs": {}},
    {"chat_template_kwargs": None},
    {"chat_template_kwargs": {"enable_thinking": None}},
    {"chat_template_kwargs": {"custom_note": "read by nobody"}},
]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_call_may_say_the_template_kwargs_of_its_policy_and_no_others(gateway: LiveGateway, path: str) -> None:
    attempt = await gateway.attempt()
    for equal in EQUAL:
        answer = await post(attempt, path, **equal)
        assert answer.status_code == 200, answer.text
    for unlike in (
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True},
        {"chat_template_kwargs": "no"},
    ):
        refused = await post(attempt, path, **unlike)
        assert refused.status_code == 400
        assert "chat_template_kwargs" in refused.json()["error"]["message"]
    assert "enable_thinking" in refused.text or "no object" in refused.text
    for call in await attempt.transitions():
        assert gateway.engine.tokenizer.decode(call.prompt_ids).endswith(f"<|im_start|>assistant\n{CLOSED}")


async def test_a_policy_that_reads_no_tools_says_which_renderers_fit(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=plain)
    async with live_gateway(
        tmp_path, engine=ScriptedEngine(tokenizer), renderer=PolicyRenderer(tokenizer, name="policy")
    ) as gateway:
        refused = await post(
            await gateway.attempt(), "chat/completions", tools=[{"type": "function", "function": {"name": "f"}}]
        )
        assert refused.status_code == 400
        sentence = refused.json()["error"]["message"]
        assert "policy 'policy' has no tool-call markup that we can read, so it cannot be offered tools" in sentence
        assert "those that fit its tokenizer are" in sentence and "qwen3" in sentence
