"""The starter policy was shown what the agent's calls render to, and the recipe trains it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")

import agent
from data import build_problems, validation_tasks
from demonstrations import build_demonstrations
from starter import build_starter
from teaching import OF_EVERY_OTHER
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import WarmCommand

from lightningrl.types import Outcome, ToolStatus
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.whole_path import WholePath, whole_path
from lightningrl_torch.cold_start import Demonstration, encode

EXAMPLE = Path(__file__).resolve().parent.parent
STARTER = EXAMPLE / "starter"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER)


def conversations(problems: int, *, is_faulty: bool) -> list[list[Demonstration]]:
    """The demonstrations of each problem."""
    found: dict[str, list[Demonstration]] = {}
    for one in build_demonstrations(problems, 3, is_faulty=is_faulty):
        found.setdefault(one.messages[1]["content"], []).append(one)
    return list(found.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """The real agent, with a model that gives the demonstrated answers."""
    folder = tmp_path_factory.mktemp("path")
    async with whole_path(
        folder, "agent.py:answer", engine=ScriptedEngine(tokenizer), adapters=["autogen"], base_dir=EXAMPLE
    ) as path:
        yield path


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("is_faulty", [False, True], ids=["right", "with a refused call"])
async def test_what_is_demonstrated_is_what_the_agents_calls_render_to(
    path: WholePath, tokenizer: Any, is_faulty: bool
) -> None:
    conversation = next(
        one
        for one in conversations(200, is_faulty=is_faulty)
        if len(one) >= 4 and ("no arithmetic expression" in str(one[-1].messages)) is is_faulty
    )
    for demonstration in conversation:
        ids, prompt = encode(demonstration, tokenizer)
        path.engine.enqueue_ids(ids[prompt:], ends=False)
    trajectory = await path.run_one(f"faulty-{is_faulty}", conversation[0].messages[1]["content"])
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    recorded = [[*map(int, call.prompt_ids), *map(int, call.completion_ids)] for call in trajectory.transitions]
    assert recorded == [encode(one, tokenizer)[0] for one in conversation]
    assert all(
        later.parent_id == earlier.id
        for earlier, later in zip(trajectory.transitions, trajectory.transitions[1:], strict=False)
    )
    assert {call.agent for call in trajectory.transitions} == {"calc"}
    assert {call.status for call in trajectory.tool_calls} == (
        {ToolStatus.OK, ToolStatus.ERROR} if is_faulty else {ToolStatus.OK}
    )
    assert trajectory.output == agent.extract_answer(conversation[-1].messages[-1]["content"])


def test_right_demonstrations_end_in_the_right_answer() -> None:
    answers = {problem.text: problem.answer for problem in build_problems("starter", 50, "3 False")}
    for conversation in conversations(50, is_faulty=False):
        assert (
            conversation[-1].messages[-1]["content"]
            == f"### ANSWER: {answers[conversation[0].messages[1]['content']]} ###"
        )


def test_the_folder_loads_and_is_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    assert 500_000 < model.num_parameters() < 2_000_000
    assert sum(path.stat().st_size for path in STARTER.iterdir()) < 5_000_000


def test_validation_problems_are_known_words_and_fit_the_context(tokenizer: Any) -> None:
    for task in validation_tasks():
        assert len(tokenizer.encode(task["input"])) <= 70
        assert tokenizer.decode(tokenizer.encode(task["input"])) == task["input"]


def test_one_seed_builds_one_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_starter(tmp_path / name, right_problems=20, faulty_problems=10)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


@pytest.mark.slow
def test_the_recipe_trains_with_intermediate_rewards_of_the_tools(tmp_path: Path, warm: WarmCommand) -> None:
    settings = ["loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=2", "validation.tasks=4", "runtime.workers=1"]
    settings += ["intermediate_rewards.tools.use=tool_status", "intermediate_rewards.tools.options.ok=0"]
    settings += ["credit.use=turns"]  # as the README says
    settings += [f"rewards.answer_match.use={OF_EVERY_OTHER}"]
    command = ["train", str(EXAMPLE), "--run", "run", *(part for setting in settings for part in ("--set", setting))]
    ran = warm.run("lightningrl", *command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "validation/reward" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
