"""Every model family's tool-call markup: what a policy says in it reaches the agent as its tool takes it, streamed or
whole."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from sizes import PATIENCE_S
from tokenizers import AddedToken

from lightningrl.errors import ConfigError
from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_server.asked_calls import read_kept_answers
from lightningrl_server.rendering.completion import Choice, CompletionText
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer

USER: Any = {"role": "user", "content": "hi"}
PROPERTIES = {
    "order": {"type": "string"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"enum": ["1", "2"]},
    "count": {"type": "integer"},
    "price": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "code": {"type": "string"},
}
SCHEMAS = {"lookup": {"type": "object", "properties": PROPERTIES}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ARGUMENTS = {
    "order": "12345",
    "note": "true",
    "size": "2",
    "count": 3,
    "price": 4,
    "tags": ["7"],
    "code": "    return {}\n",
}
ASKS = [{"id": "functions.lookup:0", "type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}]
FAMILIES: Any = import_module("renderers.base").MODEL_RENDERER_MAP
NAMES = sorted({*FAMILIES.values()} - {"default", "gpt-oss"})


def renderer_of(name: str) -> PolicyRenderer:
    """With a tokenizer of bytes that has the special tokens of the family."""
    tokenizer = tiny_tokenizer()
    for _ in range(100):
        try:
            return PolicyRenderer(tokenizer, name)
        except ConfigError as error:
            missing = re.search(r"token (?:for )?'([^']+)'", str(error))
            assert missing is not None and missing[1] not in tokenizer.get_added_vocab(), error
            tokenizer.add_tokens([AddedToken(missing[1], normalized=False, special=True)])
    raise AssertionError(name)


def read(renderer: PolicyRenderer, prompt: list[int], said: list[int], *, stream: bool) -> tuple[Choice, str, int]:
    """The choice; the content and the number of calls that were shown by its deltas."""
    text = CompletionText(renderer, prompt, allow_tools=True, schemas=SCHEMAS)
    deltas = [text.push([token], [0.0], stream=stream and place < len(said) - 1) for place, token in enumerate(said)]
    choice, last = text.finish(FinishReason.STOP)
    shown = [delta for delta in (*deltas, last) if delta is not None]
    return choice, "".join(delta.content for delta in shown), sum(len(delta.tool_calls) for delta in shown)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_reaches_the_agent_as_the_model_family_writes_it(name: str, stream: bool) -> None:
    renderer = renderer_of(name)
    content = "" if name == "llama-3" else "Let me look."  # it has no room for both
    answer = {"role": "assistant", "content": content, "tool_calls": ASKS}
    library: Any = renderer._renderer
    prompt = list(library.render_ids([USER], tools=TOOLS, add_generation_prompt=True))
    whole = list(library.render_ids([USER, answer], tools=TOOLS, add_generation_prompt=False))
    start = next(place for place, token in enumerate([*prompt, -1]) if token != whole[place])
    end = next((place for place in range(start, len(whole)) if whole[place] in renderer.stop_token_ids), len(whole))
    choice, shown, calls = read(renderer, prompt[:start], whole[start : end + 1], stream=stream)
    assert choice.content == shown == content
    assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [("lookup", ARGUMENTS)]
    assert calls == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_stop_token_that_closes_a_call_of_gpt_oss_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(
        "renderers.gpt_oss.load_harmony_encoding", lambda _: None
    )  # a vocabulary from the network, which reading does without
    renderer = renderer_of("gpt-oss")
    prompt = renderer.tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>")
    call = (
        "hm<|end|><|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>"
        + '{"count": 3}'
    )
    choice, content, _ = read(renderer, prompt, renderer.tokenizer.encode(f"{call}<|call|>"), stream=stream)
    assert (choice.content, content, choice.reasoning) == ("", "", "hm")
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("lookup", '{"count": 3}')]
    cut, _, _ = read(renderer, prompt, renderer.tokenizer.encode(call), stream=stream)
    assert cut.tool_calls == () and cut.content.endswith('{"count": 3}'), "an answer that was cut off asks for nothing"


@pytest.mark.parametrize("name", ["llama-3", "inkling"])
def test_text_that_might_have_been_a_call_is_shown_in_the_end(name: str) -> None:
    renderer = renderer_of(name)
    said = renderer.tokenizer.encode(
        '{"name": 7, "parameters": {}} is no call' if name == "llama-3" else "<|content_text|>no call<|end_message|>"
    )
    choice, content, _ = read(
        renderer, renderer.tokenizer.encode("hi"), [*said, renderer.stop_token_ids[0]], stream=True
    )
    assert content == choice.content and content.endswith("no call")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "previous"])
async def test_a_bridged_result_has_the_name_of_its_tool(tmp_path: Path, path: str) -> None:
    # as templates of gpt-oss look it up
    asked = "(messages | selectattr('tool_calls') | list | last).tool_calls[0].function.name"
    tokenizer = tiny_tokenizer(
        chat_template=CHATML_TEMPLATE.replace(
            "message.content + '\\n</tool_resp", f"{asked} + ': ' + message.content + '\\n</tool_resp"
        )
    )
    engine = ScriptedEngine(tokenizer)
    engine.enqueue('<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>', "done")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        offered = [{"type": "function", **TOOLS[0]["function"]}]
        headers = {"authorization": f"Bearer {attempt.key}"}
        async with httpx.AsyncClient(base_url=attempt.base_url, headers=headers, timeout=PATIENCE_S) as client:

            async def ask(**body: Any) -> Any:
                answer = await client.post(path.replace("previous", "responses"), json={"model": "m", **body})
                assert answer.status_code == 200, answer.text
                return answer.json()

            if path == "chat/completions":
                said = (await ask(messages=[USER], tools=TOOLS))["choices"][0]["message"]
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "7"}
                await ask(messages=[USER, said, result], tools=TOOLS)
            elif path == "messages":
                tools = [{"name": "lookup", "input_schema": SCHEMAS["lookup"]}]
                said = (await ask(messages=[USER], tools=tools))["content"]
                result = {"type": "tool_result", "tool_use_id": said[0]["id"], "content": "7"}
                turns = [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
                await ask(messages=[USER, *turns], tools=tools)
            else:
                first = await ask(input=[USER], tools=offered)
                result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "7"}
                if path == "previous":
                    await ask(input=[result], tools=offered, previous_response_id=first["id"])
                else:
                    await ask(input=[USER, *first["output"], result], tools=offered)
        one, two = await attempt.transitions()
        assert two.parent_id == one.id
        assert "<tool_response>\nlookup: 7\n</tool_response>" in tokenizer.decode(two.prompt_ids.tolist())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_text_without_quotes_is_text_where_the_tool_says_so(tmp_path: Path, stream: bool) -> None:
    tokenizer = tiny_tokenizer(chat_template=CHATML_TEMPLATE.replace("return JSON", "write <function=…> and not JSON"))
    renderer = PolicyRenderer(tokenizer)
    engine = ScriptedEngine(tokenizer)
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ARGUMENTS.items()}
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in {**values, "more": "9"}.items())
    engine.enqueue(f"<tool_call>\n<function=lookup>\n{said}</function>\n</tool_call>")
    async with live_gateway(tmp_path, engine=engine, renderer=renderer) as gateway:
        attempt = await gateway.attempt(sampling=SamplingSettings(max_tokens=2048))
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            calls: list[Any]
            if stream:
                chunks = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, stream=True)
                calls = [call async for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            else:
                answer = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
                calls = [*(answer.choices[0].message.tool_calls or ())]
        function = calls[0].function
        assert json.loads(function.arguments) == {**ARGUMENTS, "more": 9}
        (kept,) = await read_kept_answers(gateway.store, {"policy": renderer})(attempt.rollout_id, attempt.attempt)
        assert kept.arguments == function.arguments, "tools that spans tell of are joined to it"
