"""The run folder: one owner at a time, the same recipe on resume, checkpoints that are whole or absent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.sanitize import printable
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_runs.origin import newest_run
from lightningrl_runs.summary import is_live
from lightningrl_training.checkpoints import LoopState, find_checkpoint
from lightningrl_training.run import Run, problems
from lightningrl_training.run_folder import RunFolder

if TYPE_CHECKING:
    from _typeshed import TraceFunction

RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.py:train"
[policy]
model = "starter"
[rewards.exact]
use = "reward.py:exact"
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def start(source: Path, where: Path) -> RunFolder:
    return RunFolder.create(where, load_recipe(source), str(source), {}, models={"policy": "starter"})


def test_a_folder_in_use_is_refused_naming_the_process(source: Path, tmp_path: Path) -> None:
    folder = start(source, tmp_path / "run")
    code = f"from lightningrl_training.run_folder import *; from pathlib import Path; RunFolder.resume(Path({str(tmp_path / 'run')!r}), {{}})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "is in use by process" in other.stderr
    folder.close()
    RunFolder.resume(tmp_path / "run", {})[0].close()


def test_a_run_whose_process_number_is_another_programs_now_is_not_live(source: Path, tmp_path: Path) -> None:
    folder = start(source, tmp_path / "run")
    assert is_live(folder.path)
    folder.close()
    assert (folder.path / ".lock").read_text(encoding="utf-8") == str(os.getpid()), "a process that is there: this one"
    assert not is_live(folder.path)
    assert not is_live(tmp_path / "nowhere")


def test_a_run_starts_while_pages_ask_whether_it_is_live(source: Path, tmp_path: Path) -> None:
    start(source, tmp_path / "run").close()
    with (tmp_path / "run" / ".lock").open(encoding="utf-8") as page:
        fcntl.flock(page, fcntl.LOCK_SH)
        done = threading.Timer(0.05, page.close)
        done.start()
        RunFolder.resume(tmp_path / "run", {})[0].close()
        done.join()


def test_a_second_run_in_the_same_folder_is_refused(source: Path, tmp_path: Path) -> None:
    folder = start(source, tmp_path / "run")
    folder.commit_checkpoint(folder.new_checkpoint(0), LoopState(step=0, seconds=0.0, rollouts=0), keep=1)
    folder.close()
    with pytest.raises(RunFolderError, match="already holds a run"):
        start(source, tmp_path / "run")


def test_what_a_failed_reward_says_may_be_raised_when_the_run_goes_on(source: Path, tmp_path: Path) -> None:
    start(source, tmp_path / "run").close()
    source.write_text(RECIPE + "timeout_s = 90\nretries = 9\nconcurrency = 2\n[outcomes]\nmax_failed_rewards = 0.9\n")
    folder, recipe = RunFolder.resume(tmp_path / "run", {})
    assert (recipe.outcomes.max_failed_rewards, recipe.rewards["exact"].timeout_s) == (0.9, 90.0)
    folder.close()
    source.write_text(RECIPE + "weight = 2.0\n")
    with pytest.raises(RunFolderError, match=r"'rewards.exact.weight' was 1.0, is 2.0"):
        RunFolder.resume(tmp_path / "run", {})


def test_a_changed_recipe_is_refused_on_resume(source: Path, tmp_path: Path) -> None:
    start(source, tmp_path / "run").close()
    source.write_text(RECIPE + "[loop]\ngroup_size = 4\n")
    with pytest.raises(
        RunFolderError, match=r"'loop.group_size' was 8, is 4; restore it \(`--set loop.group_size=8`\), or start"
    ):
        RunFolder.resume(tmp_path / "run", {})
    RunFolder.resume(tmp_path / "run", {"loop.group_size": 8})[0].close()
    with pytest.raises(
        RunFolderError,
        match=r"'credit.use' was 'grpo', is 'rloo'; restore it \(`--set 'credit.use=\"grpo\"'`\), or start",
    ):
        RunFolder.resume(tmp_path / "run", {"loop.group_size": 8, "credit.use": "rloo"})
    with pytest.raises(
        RunFolderError, match=r"'learner.lora.rank' was not set, is 4; leave it out, or start a new run"
    ):
        RunFolder.resume(tmp_path / "run", {"loop.group_size": 8, "learner.lora.rank": 4})
    source.write_text(RECIPE + "[loop]\nsteps = 4\n")
    folder, recipe = RunFolder.resume(tmp_path / "run", {})
    assert recipe.loop.steps == 4
    folder.close()


def test_a_run_of_before_a_key_existed_goes_on(source: Path, tmp_path: Path) -> None:
    start(source, tmp_path / "run").close()
    frozen = tmp_path / "run" / "recipe.json"
    older = json.loads(frozen.read_text(encoding="utf-8"))
    del older["loop"]["dynamic_sampling"], older["policies"]
    frozen.write_text(json.dumps(older), encoding="utf-8")
    RunFolder.resume(tmp_path / "run", {})[0].close()
    source.write_text(RECIPE + "[loop]\ndynamic_sampling = 2\n")
    with pytest.raises(RunFolderError, match=r"'loop.dynamic_sampling' was 0, is 2"):
        RunFolder.resume(tmp_path / "run", {})
    frozen.write_text(json.dumps({**older, "forgotten": 1}), encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"another version of LightningRL, which read 'forgotten' otherwise"):
        RunFolder.resume(tmp_path / "run", {})


def test_only_whole_checkpoints_count_and_old_ones_go(source: Path, tmp_path: Path) -> None:
    folder = start(source, tmp_path / "run")
    assert folder.latest() is None
    for step in (1, 2, 3):
        scratch = folder.new_checkpoint(step)
        (scratch / "policies").mkdir()
        folder.commit_checkpoint(scratch, LoopState(step=step, seconds=1.0, rollouts=step * 4), keep=2)
    folder.new_checkpoint(4)
    latest = folder.latest()
    assert latest is not None
    assert latest.state.step == 3
    assert [found.folder.parent.name for found in folder.checkpoints()] == ["step-000002", "step-000003"]
    folder.close()


def test_the_newest_run_is_found_and_none_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run below"):
        newest_run(tmp_path)
    start(source, tmp_path / "runs" / "run-1").close()
    assert newest_run(tmp_path / "runs").name == "run-1"


def test_the_best_checkpoint_stays_when_others_go_also_after_a_kill_before_they_went(
    source: Path, tmp_path: Path
) -> None:
    folder = start(source, tmp_path / "run")
    scores = {1: 0.2, 2: 0.6, 3: None, 4: 0.6, 5: 0.1}
    for step, score in scores.items():
        scratch = folder.new_checkpoint(step)
        (scratch / "policies").mkdir()
        # a kill between the rename and the pruning leaves all that was there: as if everything were kept
        folder.commit_checkpoint(
            scratch, LoopState(step=step, seconds=1.0, rollouts=step, score=score), keep=1 if step == 5 else 9
        )
    assert [found.state.step for found in folder.checkpoints()] == [2, 5], "of equals the first is the best"
    assert [find_checkpoint(folder.path, which).state.step for which in (None, "best", "newest", 5, "2")] == [
        2,
        2,
        5,
        5,
        2,
    ]
    with pytest.raises(RunFolderError, match=r"no checkpoint of step 4; take 'newest', 'best', or one of: 2, 5"):
        find_checkpoint(folder.path, 4)
    folder.close()


def killing(kill_at: int) -> TraceFunction:
    """Traces, and kills this process at such a line of the run folder's code."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal lines
        if event == "line" and frame.f_code.co_filename.endswith(("run_folder.py", "belongings.py")):
            lines += 1
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


@pytest.mark.skipif(sys.platform == "win32", reason="fork and kill -9 are POSIX's")
def test_a_kill_9_at_any_line_of_saving_the_best_checkpoint_leaves_a_whole_one_and_the_next_try_saves_it(
    source: Path, tmp_path: Path
) -> None:
    folder = start(source, tmp_path / "run")

    def save(step: int, score: float, kill_at: int = 0) -> None:
        sys.settrace(killing(kill_at) if kill_at else None)
        scratch = folder.new_checkpoint(step)
        (scratch / "policies").mkdir()
        (scratch / "policies" / "weights").write_text(f"of step {step}")
        folder.commit_checkpoint(scratch, LoopState(step=step, seconds=1.0, rollouts=step, score=score), keep=1)

    kills, states = 0, set[tuple[int, ...]]()
    while True:
        shutil.rmtree(folder.path / "checkpoints")
        save(1, 0.2)
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                save(2, 0.6, kill_at=kills + 1)
                os._exit(0)
            os._exit(1)
        if (ended := os.waitpid(child, 0)[1]) == 0:
            break
        assert os.WIFSIGNALED(ended), "it was not killed, it failed"
        kills += 1
        saved = [found.state.step for found in folder.checkpoints()]
        best = find_checkpoint(folder.path, "best")
        assert best.state.step == saved[-1] == find_checkpoint(folder.path, "newest").state.step
        assert (best.folder / "weights").read_text() == f"of step {best.state.step}"
        states.add(tuple(saved))
        save(2, 0.6)
        assert [found.state.step for found in folder.checkpoints()] == [2]
    assert states == {(1,), (1, 2), (2,)} and kills > 20
    folder.close()


@pytest.mark.skipif(sys.platform == "win32", reason="fork and kill -9 are POSIX's")
def test_a_kill_9_while_a_run_is_written_over_leaves_nothing_of_it_to_the_next(source: Path, tmp_path: Path) -> None:
    run, kills = tmp_path / "run", 0

    def write_over(kill_at: int) -> None:
        sys.settrace(killing(kill_at))
        RunFolder.create(
            run, load_recipe(source), str(source), {}, models={"policy": "starter"}, overwrite=True
        ).close()

    while True:
        shutil.rmtree(run, ignore_errors=True)
        earlier = start(source, run)
        earlier.metrics.write_text("earlier", encoding="utf-8")
        earlier.commit_checkpoint(earlier.new_checkpoint(1), LoopState(step=1, seconds=1.0, rollouts=1), keep=1)
        earlier.close()
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                write_over(kills + 1)
                os._exit(0)
            os._exit(1)
        if (ended := os.waitpid(child, 0)[1]) == 0:
            break
        assert os.WIFSIGNALED(ended), "it was not killed, it failed"
        kills += 1
        try:
            following = start(source, run)
        except RunFolderError as error:
            assert "already holds a run" in str(error)
            continue
        assert (following.latest(), following.metrics.read_text(encoding="utf-8")) == (None, ""), (
            f"killed at line {kills}"
        )
        following.close()
    assert kills > 20


def test_a_checkpoint_of_before_scores_were_kept_is_the_newest_and_none_is_the_best(
    source: Path, tmp_path: Path
) -> None:
    folder = start(source, tmp_path / "run")
    folder.commit_checkpoint(folder.new_checkpoint(3), LoopState(step=3, seconds=1.0, rollouts=1), keep=1)
    loop = folder.path / "checkpoints" / "step-000003" / "loop.json"
    older = json.loads(loop.read_text(encoding="utf-8"))
    for name in ("score", "best_score", "validations_since_best"):
        del older[name]
    loop.write_text(json.dumps(older), encoding="utf-8")
    assert find_checkpoint(folder.path).state.step == 3
    with pytest.raises(
        RunFolderError, match="no checkpoint that was validated, so none is the best; take 'newest', or a step"
    ):
        find_checkpoint(folder.path, "best")
    folder.close()


def test_patience_without_validation_is_refused(source: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"loop.patience counts validations, and there are none; name held-out tasks: tasks.validation",
    ):
        load_recipe(source, {"loop.patience": 2})
    with pytest.raises(ConfigError, match=r"loop.stop_at counts validations, and there are none"):
        load_recipe(source, {"loop.stop_at": 0.9})
    with pytest.raises(ConfigError, match=r"set validation.every above 0, or remove it"):
        load_recipe(source, {"loop.patience": 2, "tasks.validation": "data.py:held_out", "validation.every": 0})


@pytest.mark.parametrize(
    "name",
    [
        "team/sql",
        "../../evil",
        "..",
        ".hidden",
        "-x",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\u202eb",
        "a\ud800",
        "",
        "  ",
        "/abs",
        "é" * 101,
    ],
)
def test_a_name_that_is_none_for_a_folder_is_refused_before_there_is_one(
    source: Path, tmp_path: Path, name: str
) -> None:
    (sentence,) = [one for one in problems(source, settings={"name": name}) if one.startswith("name: ")]
    assert "is no name for a run's folder; begin with" in sentence or "use at most 200 bytes" in sentence
    assert "\n" not in sentence and printable(sentence) == sentence
    assert not [one for one in problems(source, settings={"name": "Münchner sql v1.5 (2)"}) if one.startswith("name: ")]


def test_a_run_of_a_name_that_is_refused_now_is_read(source: Path, tmp_path: Path) -> None:
    source.write_text('name = "team/sql"\n' + RECIPE)
    start(source, tmp_path / "run").close()
    assert with_settings(Run(tmp_path / "run").recipe, {"loop.steps": 3}).name == "team/sql"
