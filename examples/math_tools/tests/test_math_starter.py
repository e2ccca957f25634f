"""The starter policy was shown what the agent's calls render to, and the recipe trains it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import agent
from data import build_problems, validation_tasks
from demonstrations import build_demonstrations
from starter import build_starter
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.gateway.engine_link import EngineLink
from lightningrl.runtime.pool import WorkerPool
from lightningrl.server.client import ServerClient
from lightningrl.server.launcher import ServerProcess
from lightningrl.server.settings import PolicySettings, ServerSettings
from lightningrl.testing.scripted_engine import ScriptedEngine
from lightningrl.types import Outcome, RolloutSpec, Task, ToolStatus, Trajectory
from lightningrl_torch.cold_start import Demonstration, encode

EXAMPLE = Path(__file__).resolve().parent.parent
STARTER = EXAMPLE / "starter"
KEY = "the-run-key"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(STARTER)


def conversations(problems: int, *, is_faulty: bool) -> list[list[Demonstration]]:
    """The demonstrations of each problem."""
    found: dict[str, list[Demonstration]] = {}
    for one in build_demonstrations(problems, 3, is_faulty=is_faulty):
        found.setdefault(one.messages[1]["content"], []).append(one)
    return list(found.values())


async def play(folder: Path, tokenizer, conversation: Sequence[Demonstration]) -> Trajectory:
    """The real agent on the demonstrated problem, with a model that gives the demonstrated answers."""
    engine = ScriptedEngine(tokenizer)
    for one in conversation:
        ids, prompt = encode(one, tokenizer)
        engine.enqueue_ids(ids[prompt:], ends=False)
    policies = {engine.policy: PolicySettings(model=STARTER)}
    settings = ServerSettings(store_url=f"sqlite:///{folder}/store.db", run_key=KEY, policies=policies)
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, KEY) as client,
        EngineLink(engine, server.url, KEY),
        WorkerPool(server.url, KEY, "agent.py:answer", workers=1, adapters=["autogen"], base_dir=EXAMPLE, log_folder=folder),
    ):
        await client.create_rollouts([RolloutSpec(id="r", task=Task(id="t", input=conversation[0].messages[1]["content"]), group_id="g")])
        await client.wait(["r"], 60)
        (trajectory,) = await client.trajectories(["r"])
    return trajectory


@pytest.mark.parametrize("is_faulty", [False, True], ids=["right", "with a refused call"])
async def test_what_is_demonstrated_is_what_the_agents_calls_render_to(tmp_path: Path, tokenizer, is_faulty: bool) -> None:
    conversation = next(
        one
        for one in conversations(200, is_faulty=is_faulty)
        if len(one) >= 4 and ("no arithmetic expression" in str(one[-1].messages)) is is_faulty
    )
    trajectory = await play(tmp_path, tokenizer, conversation)
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    recorded = [[*map(int, call.prompt_ids), *map(int, call.completion_ids)] for call in trajectory.transitions]
    assert recorded == [encode(one, tokenizer)[0] for one in conversation]
    assert all(later.parent_id == earlier.id for earlier, later in zip(trajectory.transitions, trajectory.transitions[1:], strict=False))
    assert {call.agent for call in trajectory.transitions} == {"calc"}
    assert {call.status for call in trajectory.tool_calls} == ({ToolStatus.OK, ToolStatus.ERROR} if is_faulty else {ToolStatus.OK})
    assert trajectory.output == agent.extract_answer(conversation[-1].messages[-1]["content"])


def test_right_demonstrations_end_in_the_right_answer() -> None:
    answers = {problem.text: problem.answer for problem in build_problems("starter", 50, "3 False")}
    for conversation in conversations(50, is_faulty=False):
        assert conversation[-1].messages[-1]["content"] == f"### ANSWER: {answers[conversation[0].messages[1]['content']]} ###"


def test_the_folder_loads_and_is_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    assert 500_000 < model.num_parameters() < 2_000_000
    assert sum(path.stat().st_size for path in STARTER.iterdir()) < 5_000_000


def test_validation_problems_are_known_words_and_fit_the_context(tokenizer) -> None:
    for task in validation_tasks():
        assert len(tokenizer.encode(task["input"])) <= 70
        assert tokenizer.decode(tokenizer.encode(task["input"])) == task["input"]


def test_one_seed_builds_one_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_starter(tmp_path / name, right_problems=20, faulty_problems=10)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


def test_the_recipe_trains_with_intermediate_rewards_of_the_tools(tmp_path: Path) -> None:
    settings = ["loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=2", "validation.tasks=4", "runtime.workers=1"]
    settings += ["intermediate_rewards.tools.use=tool_status", "credit.use=discounted"]  # as the README says
    command = [sys.executable, "-m", "lightningrl.cli", "train", str(EXAMPLE), "--run", str(tmp_path / "run")]
    ran = subprocess.run([*command, *(part for one in settings for part in ("--set", one))], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "validation/reward" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
