"""`pip install lightningrl` alone: a machine that runs workers, without what serves and what draws."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable
from importlib.metadata import requires
from pathlib import Path
from typing import TypeVar

import pytest
from sizes import PATIENCE_S

from lightningrl.commands import PACKAGES, missing_hint
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import RUN_KEY, running_services

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[3]
LACKING = sorted({*frozenset().union(*PACKAGES.values()), "aiohttp", "huggingface_hub", "openai", "requests", "torch"})
SITE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
AGENT = """
import httpx
from lightningrl import report_reward, role, tool

client = httpx.Client()

def answer(task):
    with role("writer"):
        body = {"model": "m", "messages": [{"role": "user", "content": task}]}
        reply = client.post("https://api.openai.com/v1/chat/completions", json=body).raise_for_status().json()
    said = reply["choices"][0]["message"]["content"]
    with tool("count", {"text": said}) as seen:
        seen.result = len(said)
    report_reward("right", float(seen.result))
    return said
"""
RECIPE = """
agent = "agent.py:answer"
tasks.train = "agent.py:tasks"
policy.model = "anything/at-all"
rewards.right.use = "agent.py:right"
runtime = { workers = 1 }
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find none of the extras' packages."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


async def beside_worker(command: list[str], environment: dict[str, str], log: Path, waiting: Awaitable[T]) -> T:
    """What `waiting` comes to while the worker runs; a worker that ends before it is a failure, with its last words."""
    with log.open("wb") as file:
        worker = await asyncio.create_subprocess_exec(*command, env=environment, stdout=file, stderr=file)
    awaited, ended = asyncio.ensure_future(waiting), asyncio.create_task(worker.wait())
    try:
        await asyncio.wait({awaited, ended}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert awaited.done(), log.read_text()
        return awaited.result()
    finally:
        awaited.cancel()
        if worker.returncode is None:
            worker.terminate()
        await ended


async def check_worker(python: str | Path, folder: Path, environment: dict[str, str]) -> None:
    """`lightningrl work` of that interpreter runs the agent, for a server of ours."""
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue("hello")
    async with running_services(folder, engine=engine) as path:
        command = [str(python), "-m", "lightningrl", "work", str(folder), "--server", path.url, "--key", RUN_KEY]
        trajectory = await beside_worker(command, environment, folder / "log", path.run_one("r0", "hi"))
    assert trajectory.output == "hello"
    assert trajectory.reported == {"right": 5.0}
    assert [(call.name, call.result) for call in trajectory.tool_calls] == [("count", "5")]
    assert [call.agent for call in trajectory.transitions] == ["writer"]


async def test_a_worker_runs_an_agent_with_rewards_roles_and_tools(folder: Path, bare: dict[str, str]) -> None:
    await check_worker(sys.executable, folder, bare)


def test_help_plugins_and_the_public_names_need_none_of_the_extras(bare: dict[str, str]) -> None:
    assert "work" in run(bare, "-m", "lightningrl", "--help").stdout
    assert "grpo" in run(bare, "-m", "lightningrl", "plugins").stdout
    ran = run(
        bare,
        "-c",
        "import importlib, pkgutil, lightningrl, lightningrl_client.runtime, lightningrl_client.control.client, lightningrl_client.client\n"
        "for name in lightningrl.__all__: getattr(lightningrl, name)\n"
        "for module in pkgutil.iter_modules(lightningrl_client.runtime.__path__): importlib.import_module(f'lightningrl_client.runtime.{module.name}')\n",
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("extra", PACKAGES)
def test_every_package_of_an_extra_has_its_hint(extra: str) -> None:
    brought = {re.split(r"[^\w-]", line)[0] for line in requires("lightningrl") or () if re.search(rf"extra == ['\"]{extra}['\"]", line)}
    assert brought
    for package in (name.replace("-", "_") for name in brought):  # as it is imported
        assert missing_hint(f"{package}.inner") == f"{package!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"


def test_a_command_that_needs_more_says_what_installs_it(bare: dict[str, str], tmp_path: Path) -> None:
    ran = run(bare, "-m", "lightningrl", "rollouts", "list", "--run", str(tmp_path))
    assert ran.returncode == 2
    assert "'sqlalchemy' is not installed; it comes with: pip install 'lightningrl[server]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.long
async def test_the_wheel_alone_is_a_worker_of_a_server_elsewhere(tmp_path: Path, folder: Path) -> None:
    python = install_wheel(tmp_path)
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for module in ("sqlalchemy", "transformers", "matplotlib", "torch"):
        found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        assert "ModuleNotFoundError" in found.stderr, f"the wheel alone brings {module}"
    await check_worker(python, folder, there)


def install_wheel(folder: Path) -> Path:
    """The interpreter of a new environment with the core's wheel and what it asks for."""
    uv = [sys.executable, "-m", "uv"]
    for command in (
        [*uv, "build", "--quiet", "--wheel", "--package", "lightningrl", "--out-dir", str(folder / "wheels"), str(ROOT)],
        [*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")],
        [*uv, "pip", "install", "--quiet", "--python", str(folder / "venv"), str(folder / "wheels" / "lightningrl-0.1.0-py3-none-any.whl")],
    ):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    return folder / "venv" / "bin" / "python"
