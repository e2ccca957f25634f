"""What a call asks its answer to be: the engine is given a grammar where it keeps to one; else it is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.types import Transition
from lightningrl_server.rendering.grammars import format_grammar
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.slow
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}
TOOL = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
FORMATS: dict[str, dict[str, Any]] = {
    "chat/completions": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 50},
}
FIELDS = {"chat/completions": "response_format", "responses": "text.format", "messages": "output_config.format"}
FORCED: dict[str, Any] = {
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "search"}},
}


async def ask(gateway: LiveGateway, path: str, **more: Any) -> Transition:
    attempt = await gateway.attempt()
    body = {"model": "m", "input" if path == "responses" else "messages": [{"role": "user", "content": "?"}], **more}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"{attempt.base_url}/{path}", json=body, headers={"x-api-key": attempt.key})
    assert answer.status_code == 200, answer.text
    (call,) = await attempt.transitions()
    return call


def engine(*, grammars: bool) -> ScriptedEngine:
    return ScriptedEngine(tiny_tokenizer(), grammars=grammars)


@pytest.mark.parametrize("path", FORMATS)
async def test_an_engine_that_binds_is_given_the_grammar_and_shown_the_schema(path: str, tmp_path: Path) -> None:
    async with live_gateway(tmp_path, engine=engine(grammars=True)) as gateway:
        call = await ask(gateway, path, **FORMATS[path])
        assert '"answer"' in call.sampling.grammar and call.sampling.grammar.startswith("start: (answer)")
        assert "fits this JSON schema" in gateway.engine.tokenizer.decode(call.prompt_ids.tolist())
        (status,) = gateway.engines.status()
        assert not any("bound" in name for name in status.ignored)
        plain = await ask(gateway, path, **({"max_tokens": 50} if path == "messages" else {}))
        assert plain.sampling.grammar == ""


@pytest.mark.parametrize("path", FORMATS)
async def test_where_the_engine_binds_nothing_it_is_said_once_and_counted(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway(tmp_path, engine=engine(grammars=False)) as gateway:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                call = await ask(gateway, path, **FORMATS[path])
                assert call.sampling.grammar == ""
                assert "fits this JSON schema" in gateway.engine.tokenizer.decode(call.prompt_ids.tolist())
        (status,) = gateway.engines.status()
        assert status.ignored[f"{FIELDS[path]} as a bound of sampling"] == 2
    said = [record.getMessage() for record in caplog.records if "cannot bind answers" in record.getMessage()]
    assert said == [
        f"policy 'policy': its engine cannot bind answers, so that {FIELDS[path]} is shown to it, and a reward has to "
        "teach it to keep to that"
    ]


async def test_a_forced_call_is_bound_after_its_beginning(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, engine=engine(grammars=True)) as gateway:
        call = await ask(gateway, "chat/completions", **FORCED)
        close = gateway.engine.tokenizer.get_added_vocab()["</tool_call>"]
        assert call.sampling.grammar.startswith(f'start: " " arguments "}}\\n" <[{close}]>\narguments: %json {{')


async def test_a_forced_call_that_is_not_bound_is_counted(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, engine=engine(grammars=False)) as gateway:
        assert (await ask(gateway, "chat/completions", **FORCED)).sampling.grammar == ""
        assert gateway.engines.status()[0].ignored["tool_choice as a bound of sampling"] == 1


def test_markup_that_stands_around_answers_is_not_bound() -> None:
    renderer = PolicyRenderer(tiny_tokenizer())
    assert format_grammar(renderer, [1, 2], SCHEMA) is not None
    renderer.family = "gpt-oss"
    assert format_grammar(renderer, [1, 2], SCHEMA) is None
