"""Rollouts of the default agent in workers, with a scripted policy: side by side, apart, scored, and gone when killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from harbor_folders import write_task, write_tasks
from processes import is_alive
from sizes import PATIENCE_S, sized

from lightningrl import Task
from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.task_sources import load_source_agent, worker_agent
from lightningrl_tasks_harbor import HarborTasks
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_training.task_sources import build_source, draw_sets

AGENT = """
from lightningrl_tasks_harbor import HarborTasks

answer = HarborTasks({folder!r}, box="unshare", trusted=True, max_turns=4, max_output=200, command_timeout_s={limit_s}).agent
"""

RECIPE = """
agent = "tasks"
policy.model = "m"
rewards.tests.use = "tasks"

[tasks]
use = "harbor"
options = { folder = "tasks", box = "unshare", trusted = true, validation_share = 0.4 }
train = { seed = 1, count = 4 }
validation = { seed = 2, count = 2 }
"""


def bash(*commands: str) -> dict[str, Any]:
    calls = [{"function": {"name": "bash", "arguments": json.dumps({"command": command})}} for command in commands]
    return {"content": "", "tool_calls": calls}


def results_of(body: dict[str, Any]) -> list[str]:
    """What the tools have said so far."""
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


def pool_of(server: ScriptedServer, folder: Path, *, concurrency: int = 1, limit_s: float = 900) -> WorkerPool:
    code = AGENT.format(folder=str(folder / "tasks"), limit_s=limit_s)
    (folder / "agent.py").write_text(code, encoding="utf-8")
    return WorkerPool(
        server.url,
        server.run_key,
        "agent.py:answer",
        workers=1,
        concurrency=concurrency,
        base_dir=folder,
        log_folder=folder,
    )


async def roll_out(
    server: ScriptedServer, folder: Path, tasks: list[Task], concurrency: int = 1, limit_s: float = 900
) -> dict[str, Any]:
    """The outputs by rollout id."""
    for task in tasks:
        server.add_rollout(task.id, task.input, timeout_s=PATIENCE_S)
    async with pool_of(server, folder, concurrency=concurrency, limit_s=limit_s):
        await server.wait_finished(timeout_s=PATIENCE_S)
    results = {task.id: server.result(task.id) for task in tasks}
    for result in results.values():
        assert result is not None and result["outcome"] == "succeeded", result
    return {task_id: json.loads(json.dumps(result["output"])) for task_id, result in results.items() if result}


async def test_eight_rollouts_at_concurrency_four_have_boxes_of_their_own(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 1)
    folder = str(tmp_path / "tasks" / "number-0")
    text = Path(folder, "instruction.md").read_text(encoding="utf-8")
    right = (re.search(r"\d+", text) or [""])[0]
    tasks = [Task(id=f"r{n}", input={"instruction": f"RID=r{n} {text}", "folder": folder}) for n in range(8)]

    def play(body: dict[str, Any]) -> dict[str, Any]:
        name = (re.search(r"RID=(r\d)", json.dumps(body)) or ["", ""])[1]
        value = right if int(name[1]) % 2 else "nothing"
        steps = [
            bash(f"ls /app; echo {name} > /app/mine"),
            bash(f"cat mine; echo {value} > answer.txt"),
            {"content": f"{name} is done"},
        ]
        return steps[len(results_of(body))]

    with ScriptedServer(play, hold_until=4) as server:
        outputs = await roll_out(server, tmp_path, tasks, concurrency=4)
        assert server.most_open == 4
        last = {call.rollout_id: call for call in server.calls if len(results_of(call.body)) == 2}
        assert {name: results_of(call.body) for name, call in last.items()} == {
            f"r{n}": ["[no output]", f"r{n}"] for n in range(8)
        }
    source = HarborTasks(tmp_path / "tasks", box="unshare", validation_share=0)
    assert [source.reward(task, outputs[task.id]) for task in tasks] == [0.0, 1.0] * 4
    output = outputs["r3"]
    assert (output["answer"], output["turns"], output["ended"], output["box"]) == ("r3 is done", 3, "answer", "unshare")


async def test_the_policy_sees_what_it_did_wrong_and_its_turns_and_time_end(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks", "t", instruction="Go.", solve="true", test="echo 0.5 > /logs/verifier/reward.txt")
    task = {"instruction": "Go.", "folder": str(tmp_path / "tasks" / "t")}
    wrong = [
        {"tool_calls": [{"function": {"name": "python", "arguments": "{}"}}]},
        {"tool_calls": [{"function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}]},
        bash("seq 1 1000", "false"),
        bash("sleep 60"),
    ]
    with ScriptedServer(
        lambda body: wrong[sum(message["role"] == "assistant" for message in body["messages"])]
    ) as server:
        outputs = await roll_out(server, tmp_path, [Task(id="r", input=task)], limit_s=0.5)
        results = results_of(server.calls[-1].body)
    assert results[:2] == [
        "error: no tool named 'python'; there is bash",
        'error: write the arguments as {"command": "ls"}',
    ]
    assert "bytes left out]" in results[2] and len(results[2]) < 300 and results[3] == "[status 1]"
    assert (outputs["r"]["turns"], outputs["r"]["ended"]) == (4, "turns")
    assert outputs["r"]["verdict"]["rewards"] == {"reward": 0.5}


async def test_a_killed_worker_leaves_no_process_of_its_boxes(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 1)
    folder, word, slept = str(tmp_path / "tasks" / "number-0"), f"98766{os.getpid()}", set[str]()

    def play(body: dict[str, Any]) -> dict[str, Any]:
        text = body["messages"][1]["content"]
        if text in slept:
            return {"content": "done"}
        slept.add(text)
        return bash(f"sleep {word}")

    with ScriptedServer(play) as server:
        async with pool_of(server, tmp_path), asyncio.timeout(PATIENCE_S):
            for number in range(sized(2, 20)):
                task = {"instruction": f"{number}", "folder": folder}
                server.add_rollout(f"r{number}", task, timeout_s=PATIENCE_S)
                family = ancestors(await wait_for_command(f"sleep {word}"))
                worker = worker_of(family)
                os.kill(worker, signal.SIGKILL)
                while any(is_alive(pid) for pid in family[: family.index(worker) + 1]):
                    await asyncio.sleep(0.02)
                # one that ends: of a worker that dies again and again the supervisor gives up
                server.add_rollout(f"again-{number}", task, timeout_s=PATIENCE_S)
                await server.wait_finished(f"r{number}", f"again-{number}", timeout_s=PATIENCE_S)
    assert commands(f"sleep {word}") == []


async def wait_for_command(command: str) -> int:
    while not (pids := commands(command)):
        await asyncio.sleep(0.02)
    return pids[0]


def commands(command: str) -> list[int]:
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if command_of(path) == command]


def command_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def ancestors(pid: int) -> list[int]:
    """The process, its parent, and so on, up to this test."""
    line: list[int] = []
    while pid not in (0, 1, os.getpid()):
        line.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return line


def worker_of(family: list[int]) -> int:
    """The process that opened the box: the parent of the outermost program of the box."""
    inner = [place for place, pid in enumerate(family) if "_inside.py" in command_of(Path(f"/proc/{pid}/cmdline"))]
    return family[max(inner) + 1]


def test_a_recipe_names_the_source_and_workers_make_it_anew(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 10)
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    recipe, plugins = load_recipe(tmp_path / "recipe.toml"), load_plugins()
    source = build_source(recipe, plugins)
    assert isinstance(source, HarborTasks)
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (4, 2)
    assert {task.input["folder"] for task in sets.train} == {task.id for task in sets.train}
    assert load_source_agent(worker_agent(recipe), tmp_path) is not None
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("trusted", "trustd"), encoding="utf-8")
    with pytest.raises(ConfigError, match="trusted"):
        build_source(load_recipe(tmp_path / "recipe.toml"), plugins)
