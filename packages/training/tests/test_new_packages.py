"""`lightningrl new` and `lightningrl init`: what they write works as it is."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sizes import sized
from typer.testing import CliRunner
from warm import WarmCommand

from lightningrl.commands import app
from lightningrl.errors import ConfigError, LightningError
from lightningrl.plugins import PluginManager
from lightningrl.scaffold import STACKS, new_agent, new_package
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.commands.init import init

HOOKS = {
    "adapter": "lightningrl_adapters",
    "backend": "lightningrl_trainers",
    "command": "lightningrl_commands",
    "credit": "lightningrl_credit_assigners",
    "dialect": "lightningrl_dialects",
    "page": "lightningrl_view_pages",
    "reward": "lightningrl_reward_functions",
    "tasks": "lightningrl_tasks",
}


@pytest.mark.parametrize("kind", ["backend", "command", "credit", "dialect", "page", "reward", "tasks"])
def test_a_new_package_passes_its_conformance_suite(tmp_path: Path, kind: str) -> None:
    folder = new_package(kind, "my-own", tmp_path / "mine")
    assert [
        str(file)
        for file in folder.rglob("*")
        if "NAME_" in str(file) or (file.is_file() and "NAME_" in file.read_text())
    ] == []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:langsmith_plugin"]
    tests = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert tests.returncode == 0, tests.stdout[-3000:]
    assert " passed" in tests.stdout
    assert "PytestDeprecationWarning" not in tests.stdout + tests.stderr


@pytest.mark.parametrize("kind", HOOKS)
def test_a_new_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = new_package(kind, f"found-{kind}", tmp_path / "mine")
    monkeypatch.syspath_prepend(str(folder / "src"))
    manager = PluginManager()
    manager.register(__import__(f"lightningrl_found_{kind}.plugin", fromlist=["plugin"]))
    assert set(manager.records(HOOKS[kind])) == {f"found-{kind}" if kind in {"command", "page"} else f"found_{kind}"}


def test_a_new_package_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    said = CliRunner().invoke(app, ["new", "adapter", "foo"])
    assert said.exit_code == 0, said.output
    assert "pip install -e './lightningrl-foo[test]' && pytest lightningrl-foo" in said.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lightningrl-foo", "notes.txt"]


def test_a_new_agent_is_a_recipe_whose_parts_are_there(tmp_path: Path) -> None:
    folder = new_agent(tmp_path / "mine")
    assert load_recipe(folder).policy.model == "starter"
    assert {path.name for path in folder.iterdir()} == {
        "agent.py",
        "recipe.toml",
        "reward.py",
        "starter.py",
        "tasks.py",
    }
    with pytest.raises(ConfigError, match="in use"):
        new_agent(folder)


def test_init_says_what_it_made_before_it_makes_the_policy(tmp_path: Path) -> None:
    """It is ended then; the fixture `first_agent` runs one to its end."""
    command = [sys.executable, "-m", "lightningrl", "init", "mine"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as init:
        assert init.stdout is not None
        try:
            said = [init.stdout.readline(), init.stdout.readline()]
        finally:
            os.killpg(init.pid, signal.SIGKILL)
    assert said[0] == "made mine: agent.py, recipe.toml, reward.py, starter.py, tasks.py\n"
    assert said[1].startswith("making its starting policy")


def test_a_starter_that_fails_is_tried_again_as_the_sentence_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(LightningError) as error:
        init(tmp_path / "my agent")
    assert shlex.split(str(error.value).rpartition(": ")[2]) == ["python", str(tmp_path / "my agent" / "starter.py")]


def test_an_agent_from_an_unknown_stack_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no agent is made from 'crewai'; choose one of: openai, langgraph, "):
        new_agent(tmp_path / "mine", "crewai")
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_a_new_agent_learns(tmp_path: Path, warm: WarmCommand, first_agent: Path, stack: str) -> None:
    """In about a minute on two idle cores, with nothing downloaded."""
    new_agent(tmp_path / "mine", stack)
    shutil.copytree(first_agent / "starter", tmp_path / "mine" / "starter")

    def run(*words: str) -> str:
        ran = warm.run("lightningrl", *words, cwd=tmp_path, environment={"COLUMNS": "160", "HF_HUB_OFFLINE": "1"})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert "reward    " in run("try", "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}, "nothing is left of a try"
    said = run("train", "mine", "--steps", str(sized(5, 15)))
    scores = [float(line.split("score ")[1].split()[0]) for line in said.splitlines() if "score" in line]
    assert scores[0] < 0.3 < sized(0.4, 0.9) < scores[-1]
