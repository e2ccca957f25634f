"""A chat template of the recipe's own is the one by which whoever looks at a run reads its prompts: pages, judges, rows.

The template is the example of docs/reference/models.md, before a model that has none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, build_tokenizer, write_folder
from openai import AsyncOpenAI
from recorded import RECIPE, write_recipe
from rich.console import Console
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.plugins import load_plugins
from lightningrl.records import Score
from lightningrl.types import Outcome, Trajectory
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run
from lightningrl_runs.text import show_rollout
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_traces.curation.curation import curate
from lightningrl_traces.curation.rules import Rules
from lightningrl_training.build import build_credit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
(TEMPLATE,) = re.findall(r"```jinja title=gemma_of_mine.jinja\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
AGENT = """
from openai import OpenAI

def answer(question):
    messages = [{"role": "user", "content": question}]
    return OpenAI().chat.completions.create(model="m", messages=messages).choices[0].message.content

def tasks():
    return [{"input": "What costs tea?"}]

def right(task, output, trajectory):
    return 1.0
"""
TRIED = """
agent = "tried_agent.py:answer"
tasks.train = "tried_agent.py:tasks"
policy = { model = "model", chat_template = "mine.jinja" }
rewards.right.use = "tried_agent.py:right"
validation.sampling.max_tokens = 8
learner = { dtype = "float32", device = "cpu" }
"""
TOOLS: Any = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "price", "arguments": {"of": "tea"}}</tool_call>'


@pytest.fixture
async def run(tmp_path: Path) -> tuple[Path, Trajectory]:
    """A run folder: one rollout of two calls, with a tool between them."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine.jinja").write_text(TEMPLATE, encoding="utf-8")
    changes = {"chat_template": "mine.jinja", "trained_agents": None}
    write_recipe(folder, RECIPE.model_copy(update={"policy": RECIPE.policy.model_copy(update=changes)}))
    tokenizer = build_tokenizer(next(family for family in FAMILIES if family.name == "gemma2"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "policy")
    engine, renderer = ScriptedEngine(tokenizer), PolicyRenderer(tokenizer, chat_template=TEMPLATE)
    engine.enqueue(f"Look.{CALL}", "Three euros.")
    async with live_gateway(folder, engine=engine, renderer=renderer) as gateway:
        attempt = await gateway.attempt()
        history: list[Any] = [{"role": "user", "content": "What costs tea?"}]
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
                message = answer.choices[0].message
                history.append(message.model_dump(exclude_none=True))
                history += [
                    {"role": "tool", "tool_call_id": call.id, "content": "3 €"} for call in message.tool_calls or []
                ]
        assert [message["role"] for message in history] == ["user", "assistant", "tool", "assistant"]
        first, second = await attempt.transitions()
        past = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
        assert second.prompt_ids.tolist()[: len(past)] == past
        rollout = attempt.rollout_id
        await gateway.store.finish_attempt(rollout, 1, Outcome.SUCCEEDED, "Three euros.")
        await gateway.store.set_scores([Score(rollout_id=rollout, attempt=1, reward=1.0)])
        (trajectory,) = await gateway.store.trajectories([rollout])
    return folder, trajectory


def assert_read(calls: list[list[tuple[str, str]]]) -> None:
    (first, second) = calls
    assert [who for who, _ in first] == ["user", "policy"]
    assert first[0][1].startswith("To call a tool") and first[0][1].endswith("What costs tea?")
    assert first[1][1] == f"Look.{CALL}"
    assert second == [("user", "3 €"), ("policy", "Three euros.")]


async def test_pages_and_the_terminal_show_roles_and_no_unknown_markup(run: tuple[Path, Trajectory]) -> None:
    folder, trajectory = run
    async with open_run(folder) as stored:
        assert_read(stored.messages(trajectory))
        shown = await show_rollout(stored, trajectory.rollout_id, full=True)
    console = Console(width=160, record=True)
    console.print(shown)
    text = console.export_text()
    assert re.search(r"^user +To call", text, re.MULTILINE) and not re.search(r"^unknown", text, re.MULTILINE)


@pytest.mark.slow
def test_try_shows_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has no recipe."""
    write_folder(next(family for family in FAMILIES if family.name == "gemma2"), tmp_path / "model", weights=True)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "mine.jinja").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "tried_agent.py").write_text(AGENT, encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(TRIED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["try", "recipe.toml", "--full"])
    assert result.exit_code == 0, result.output
    assert re.search(r"^user +What costs tea\?", result.output, re.MULTILINE), result.output
    assert not re.search(r"^unknown", result.output, re.MULTILINE)


async def test_a_judge_reads_who_said_what(run: tuple[Path, Trajectory]) -> None:
    folder, trajectory = run
    recipe = RunOrigin.read(folder).recipe
    evaluator, _ = build_credit(recipe, load_plugins(), {"policy": str(folder / "policy")})
    assert_read(await evaluator.policies.read(trajectory))


async def test_rows_have_the_messages_that_the_agent_sent(run: tuple[Path, Trajectory], tmp_path: Path) -> None:
    folder, _ = run
    await curate([folder], tmp_path / "rows", Rules())
    *_, row = [json.loads(line) for line in (tmp_path / "rows" / "sft.jsonl").read_text("utf-8").splitlines()]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][0]["content"] == "What costs tea?"
    assert row["messages"][1]["tool_calls"][0]["function"]["name"] == "price"


async def test_a_file_that_has_gone_leaves_what_can_be_read(run: tuple[Path, Trajectory]) -> None:
    folder, trajectory = run
    (folder / "mine.jinja").unlink()
    async with open_run(folder) as stored:
        assert stored.messages(trajectory)[1][-1] == ("policy", "Three euros.")
