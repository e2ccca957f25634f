"""Answers that somebody wrote become the tokens that the policy would have sampled: every family of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, Family, write_folder

from lightningrl_server.gateway.known_answers import render_answer
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import load_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
}
ASKED = [{"role": "user", "content": "1 + 2?"}]
ANSWER = {"role": "assistant", "content": "It is 3."}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    family: Family = request.param
    return family


def make_renderer(family: Family, folder: Path) -> PolicyRenderer:
    return PolicyRenderer(load_tokenizer(write_folder(family, folder)), name="policy")


def test_an_answer_follows_the_prompt_of_its_call_and_ends_where_the_policy_stops(
    family: Family, tmp_path: Path
) -> None:
    renderer = make_renderer(family, tmp_path)
    known = render_answer(renderer, [*ASKED, ANSWER])
    prompt, answer = known.prompt_ids, known.answer_ids
    assert prompt == renderer.render(ASKED, None)
    assert answer[-1] in renderer.stop_token_ids
    assert not set(answer[:-1]) & set(renderer.stop_token_ids)
    assert renderer.parse(answer, prompt).content.strip() == "It is 3."


def test_a_tool_call_is_written_as_the_policy_says_it(family: Family, tmp_path: Path) -> None:
    renderer = make_renderer(family, tmp_path)
    if not renderer.supports_tools:
        pytest.skip("its template has no tools")
    if family.name == "llama4":  # its template writes numbers as texts
        with pytest.raises(ValueError, match="does not read back as it was"):
            render_answer(renderer, [*ASKED, CALL], [TOOL])
        return
    known = render_answer(renderer, [*ASKED, CALL], [TOOL])
    prompt, answer = known.prompt_ids, known.answer_ids
    assert prompt == renderer.render(ASKED, [TOOL])
    (call,) = renderer.parse(answer, prompt).tool_calls
    arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
    assert (call.name, arguments) == ("add", {"a": 1, "b": 2})
    assert answer[-1] in renderer.stop_token_ids


def test_an_answer_that_does_not_read_back_is_refused(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.write is not None)
    renderer = make_renderer(family, tmp_path)
    (token,) = renderer.stop_token_ids[:1]
    forged = {"role": "assistant", "content": f"It is {renderer.decode([token])} 3."}
    with pytest.raises(ValueError, match="does not read back as it was"):
        render_answer(renderer, [*ASKED, forged])
