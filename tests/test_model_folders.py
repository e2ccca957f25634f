"""Twenty model folders, each with its family's template and weights as small as can be: tools, thinking, system prompts
and strict turns are answered or refused, and what is refused is refused before weights are loaded."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, Family, write_folder
from openai import AsyncOpenAI

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.types import SamplingSettings
from lightningrl_client.recipe_file import load_recipe
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_training.build import Parts
from lightningrl_training.export import stop_tokens
from lightningrl_training.serving import server_settings

RECIPE = """
agent = "folder_agent.py:answer"
[tasks]
train = "folder_agent.py:tasks"
[policy]
model = "model"
[rewards.right]
use = "folder_agent.py:right"
[sampling]
max_tokens = 8
[validation.sampling]
max_tokens = 8
[learner]
dtype = "float32"
device = "cpu"
"""
AGENT = """
def answer(task): return task
def tasks(): return [{"input": "a"}, {"input": "b"}]
def right(task, output, trajectory): return 1.0
"""
SYSTEM: Any = {"role": "system", "content": "be brief"}
USER: Any = {"role": "user", "content": "hi"}
TOOLS: Any = [{"type": "function", "function": {"name": "clock", "description": "d", "parameters": {"type": "object"}}}]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe beside the model, by family."""
    made: dict[str, Path] = {}
    for family in FAMILIES:
        here = made[family.name] = tmp_path_factory.mktemp(family.name)
        (here / "folder_agent.py").write_text(AGENT)
        (here / "recipe.toml").write_text(RECIPE)
        write_folder(family, here / "model", weights=True)
    return made


@pytest.fixture(autouse=True)
def _away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("folder_agent", None)


def build(here: Path, **settings: Any) -> Parts:
    named = {f"policy.{name}": value for name, value in settings.items()}
    return Parts.build(load_recipe(here / "recipe.toml", named), load_plugins())


def refused(here: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(here, **settings)
    return str(caught.value)


@every_family
def test_tools_are_answered_or_the_remedy_is_said_at_the_start(family: Family, folders: dict[str, Path]) -> None:
    here = folders[family.name]
    without = build(here).without_tools
    assert (without == ()) == (family.markup is not None)
    if family.markup is None:
        (sentence,) = without
        assert "has no tool-call markup that we can read, so it cannot be offered tools; set " in sentence
        is_chatml = "<|im_start|>" in family.tokens
        assert ("policy.chat_template = 'chatml' or" in sentence) == is_chatml
        assert ("policy.chat_template = 'gemma' or" in sentence) == (not is_chatml)
        assert sentence.endswith("a Jinja file that writes tools, calls and results")


@every_family
def test_the_shipped_template_takes_the_place_of_the_models_or_is_refused(
    family: Family, folders: dict[str, Path]
) -> None:
    here = folders[family.name]
    if {family.eos, *family.tokens} >= {"<|im_start|>", "<|im_end|>"}:
        parts = build(here, chat_template="hermes")
        assert parts.without_tools == ()
        recipe = load_recipe(here / "recipe.toml", {"policy.chat_template": "hermes"})
        text = server_settings(recipe, parts, "sqlite://").policies["policy"].chat_template
        renderer = PolicyRenderer(here / "model", chat_template=text)
        assert "<tools>" in renderer.decode(renderer.render([SYSTEM, USER], TOOLS))
    else:
        sentence = refused(here, chat_template="hermes")
        assert "chat_template 'hermes' writes turns between <|im_start|> and <|im_end|>" in sentence
        assert "give a Jinja file that writes the model's own turns" in sentence


@every_family
def test_thinking_is_switched_where_the_template_has_a_switch(family: Family, folders: dict[str, Path]) -> None:
    here, kwargs = folders[family.name], {"enable_thinking": False}
    if not family.thinks:
        assert "never reads 'enable_thinking'" in refused(here, chat_template_kwargs=kwargs)
        return
    assert build(here, chat_template_kwargs=kwargs).without_tools == ()
    thinking, plain = PolicyRenderer(here / "model"), PolicyRenderer(here / "model", template_kwargs=kwargs)
    assert plain.decode(plain.render([USER], TOOLS)).endswith("<think>\n\n</think>\n\n")
    assert not thinking.decode(thinking.render([USER], TOOLS)).endswith("</think>\n\n")


@every_family
def test_a_system_prompt_and_turns_of_one_role_become_each_familys_prompt(
    family: Family, folders: dict[str, Path]
) -> None:
    renderer = PolicyRenderer(folders[family.name] / "model")
    for messages in ([SYSTEM, USER], [USER, USER], [SYSTEM, USER, {"role": "assistant", "content": "x"}, USER, USER]):
        text = renderer.decode(renderer.render(messages, None))
        assert text.count("hi") == sum(message is USER for message in messages)
        assert ("be brief" in text) == (SYSTEM in messages)


@every_family
async def test_the_torch_backend_answers_over_http(family: Family, folders: dict[str, Path], tmp_path: Path) -> None:
    parts = build(folders[family.name])
    backend = parts.backends["policy"]()
    try:
        renderer = PolicyRenderer(parts.models["policy"], name="policy")
        async with live_gateway(tmp_path, attach=False, renderer=renderer) as gateway:
            gateway.engines.attach(backend.engine)
            attempt = await gateway.attempt(sampling=SamplingSettings(max_tokens=8, seed=1))
            tools = {"tools": TOOLS} if family.markup else {}
            async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
                answer = await client.chat.completions.create(model="m", messages=[SYSTEM, USER], **tools)
            (call,) = await attempt.transitions()
        assert answer.usage is not None and answer.usage.completion_tokens == len(call.completion_ids) > 0
        assert stop_tokens(parts.models["policy"], "auto", name="policy") == renderer.stop_token_ids
    finally:
        backend.close()


def test_what_is_wrong_is_said_before_weights_are_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    here = folders["smollm2-gguf"]
    weights = here / "model" / "model.safetensors"
    moved = weights.rename(tmp_path / "model.safetensors")
    try:
        assert (
            "no chat_template 'hermse'; give a Jinja file beside the recipe, or a shipped one: chatml, gemma, hermes, "
            in refused(here, chat_template="hermse")
        )
        assert "leave one of them out" in refused(here, chat_template="hermes", renderer="qwen3")
        (here / "mine.jinja").write_text("{% for m in messages %}{{ m.content }")
        assert "does not compile" in refused(here, chat_template="mine.jinja")
        (here / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
        assert "no tool-call markup that we can read" in build(here, chat_template="mine.jinja").without_tools[0]
    finally:
        moved.rename(weights)


def test_a_base_model_without_a_template_answers_by_the_recipes(folders: dict[str, Path], tmp_path: Path) -> None:
    here = shutil.copytree(folders["smollm2-gguf"], tmp_path / "base")
    (here / "model" / "chat_template.jinja").unlink()
    assert "has no chat template, so messages cannot become its prompt; set policy.chat_template = 'chatml' or" in (
        refused(here)
    )
    parts = build(here, chat_template="hermes")
    assert parts.without_tools == ()
    parts.backends["policy"]().close()
