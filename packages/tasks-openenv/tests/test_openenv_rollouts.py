"""Rollouts of the default agent through worker, gateway and store: rewards per call and per rollout, sessions that end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from lightningrl.types import Outcome, RolloutSpec, Task, ToolCall, ToolStatus, Trajectory
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, running_services

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
StartServer = Callable[..., str]
HERE = Path(__file__).parent


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculate(prompt: str) -> str:
    """A policy that adds the two numbers it reads, and answers with what the tool says."""
    first, second = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1])
    return call("answer", text=str(first + second)) if str(first + second) in prompt else call("add", a=first, b=second)


def asked(index: int, **options: Any) -> dict[str, Any]:
    return {"options": options, "task": f"train-{index}"}


def tools_of(trajectory: Trajectory) -> list[ToolCall]:
    """Its tool calls in the order of the calls that asked for them."""
    order = [transition.id for transition in trajectory.transitions]
    return sorted(trajectory.tool_calls, key=lambda tool: order.index(str(tool.transition_id)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    async with running_services(tmp_path_factory.mktemp("path"), engine=ScriptedEngine(tiny_tokenizer())) as path:
        yield path


async def test_eight_rollouts_at_concurrency_four_share_two_sessions_and_each_call_has_its_steps_reward(
    path: WholePath, start_server: StartServer, command: list[str]
) -> None:
    url = start_server("sums", "2")
    name = "real" if "sums_server.py" in command[-1] else "ours"
    path.engine.reply = calculate
    async with path.workers("played.py:answer", base_dir=HERE, concurrency=4):
        trajectories = await path.run({f"{name}-{index}": asked(index, url=url) for index in range(8)})
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        assert [transition.reported for transition in trajectory.transitions] == [{"openenv": 0.1}, {"openenv": 1.0}]
        assert trajectory.reported == {"openenv": pytest.approx(1.1)}
        assert trajectory.output["done"] is True
        assert [step["tool"] for step in trajectory.output["actions"]] == ["add", "answer"]
        assert [(tool.name, tool.status) for tool in tools_of(trajectory)] == [
            ("add", ToolStatus.OK),
            ("answer", ToolStatus.OK),
        ]
    if name == "ours":
        assert httpx.get(f"{url}/counts").json() == [0, 2, 8]


async def test_calls_that_are_wrong_are_told_to_the_model_and_no_call_is_made_after_the_last(
    path: WholePath, start_server: StartServer
) -> None:
    path.engine.reply = None
    path.engine.enqueue(call("nothing"), call("add", a="x"), call("wait", seconds=0), "I give up.")
    name = start_server().rpartition(":")[-1]
    async with path.workers("played.py:answer", base_dir=HERE):
        gave_up = await path.run_one(f"wrong-{name}", asked(0, url=start_server(), unscored=0.0))
        path.engine.enqueue(*[call("add", a=1, b=2)] * 3)
        bounded = await path.run_one(f"long-{name}", asked(0, url=start_server(), max_calls=3, longest_observation=1))
    assert gave_up.outcome is Outcome.SUCCEEDED, gave_up.error
    assert [tool.status for tool in tools_of(gave_up)] == [
        ToolStatus.UNKNOWN_TOOL,
        ToolStatus.INVALID_ARGUMENTS,
        ToolStatus.OK,
    ]
    assert "there are: add, answer, wait" in tools_of(gave_up)[0].result
    assert gave_up.output["reward"] == 0.0
    assert (len(bounded.transitions), bounded.output["done"]) == (3, False)
    assert bounded.reported == {"openenv": pytest.approx(0.3)}


async def test_a_policy_without_tool_calls_answers_in_plain_text(path: WholePath, start_server: StartServer) -> None:
    path.engine.reply = None
    url = start_server()
    path.engine.enqueue("865", "864")
    async with path.workers("played.py:answer", base_dir=HERE):
        wrong = await path.run_one(f"text-{url[-5:]}", asked(0, url=url, submit="answer.text"))
        right = await path.run_one(f"text2-{url[-5:]}", asked(0, url=url, submit="answer.text", system="Answer."))
    assert (wrong.outcome, wrong.output["reward"]) == (Outcome.SUCCEEDED, 0.0), wrong.error
    assert (right.output["reward"], right.transitions[0].reported) == (1.0, {"openenv": 1.0})
    assert [tool.transition_id for tool in right.tool_calls] == [right.transitions[0].id]


async def test_an_environment_of_actions_is_one_function(path: WholePath, start_server: StartServer) -> None:
    path.engine.reply = None
    url = start_server("action")
    path.engine.enqueue(call("act"), *(call("act", number=number) for number in range(8)))
    async with path.workers("played.py:answer", base_dir=HERE):
        trajectory = await path.run_one(f"act-{url[-5:]}", {"options": {"url": url}, "task": "train-0-seed3"})
    path.engine._script.clear()
    assert (trajectory.outcome, trajectory.reported) == (Outcome.SUCCEEDED, {"openenv": 1.0}), trajectory.error
    assert tools_of(trajectory)[0].status is ToolStatus.INVALID_ARGUMENTS
    assert tools_of(trajectory)[-1].result == '{"question": "", "verdict": "right"}'


async def test_no_reward_at_all_fails_the_rollout_with_the_sentence(path: WholePath, start_server: StartServer) -> None:
    path.engine.reply = None
    url = start_server("unrewarded")
    path.engine.enqueue(call("add", a=1, b=2), "3")
    async with path.workers("played.py:answer", base_dir=HERE):
        trajectory = await path.run_one(f"unrewarded-{url[-5:]}", asked(0, url=url))
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "none of 1 steps had a reward" in str(trajectory.error)


def servers_of(marker: str) -> list[int]:
    """Processes whose command line has this word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words and b"keeper.py" not in b"".join(words):
            found.append(int(folder.name))
    return found


async def wait_for(what: Callable[[], Any], patience_s: float = 120.0) -> Any:
    ends = time.monotonic() + patience_s
    while not (value := what()):
        assert time.monotonic() < ends, "it did not come"
        await asyncio.sleep(0.02)
    return value


@pytest.mark.skipif(not Path("/proc").exists(), reason="it looks for processes in /proc")
async def test_a_server_killed_in_mid_rollout_is_started_again_for_the_next_attempt_and_ends_with_its_worker(
    path: WholePath, command: list[str], tmp_path: Path
) -> None:
    path.engine.reply = None
    path.engine.enqueue(call("wait", seconds=600))
    marker = str(tmp_path)
    options = {"command": shlex.join([*command, "{port}", "sums", "8", marker])}
    name = f"kill-{Path(command[-1]).stem}"
    spec = RolloutSpec(id=name, task=Task(id=name, input=asked(0, **options)), group_id=name, max_attempts=3)
    async with path.workers("played.py:answer", base_dir=HERE):
        await path.client.create_rollouts([spec])
        requests = len(path.engine.requests)
        await wait_for(lambda: len(path.engine.requests) > requests and servers_of(marker))
        await asyncio.sleep(0.5)  # the step waits
        path.engine.enqueue(call("answer", text="864"))
        (killed,) = servers_of(marker)
        os.kill(killed, signal.SIGKILL)
        trajectory = await ended(path, name)
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        assert (trajectory.attempt, trajectory.reported) == (2, {"openenv": 1.0})
        (second,) = servers_of(marker)
        assert second != killed
        os.kill(trajectory.output["pid"], signal.SIGKILL)  # the worker: nobody is left who could tell the server
        await wait_for(lambda: not servers_of(marker))


async def ended(path: WholePath, name: str) -> Trajectory:
    ends = time.monotonic() + 300
    while not await path.client.wait([name], 60) and time.monotonic() < ends:
        pass
    (trajectory,) = await path.client.trajectories([name])
    return trajectory
