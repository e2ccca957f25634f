"""`lightningrl.train` and `Run`: what the command line does, in a script, an event loop, and of a run that lies
elsewhere now."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file
from teaching import OF_EVERY_OTHER, of_every_other
from transformers import AutoTokenizer
from warm import WarmCommand

import lightningrl
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_credit.rewards import RewardSet
from lightningrl_runs.segments import SegmentKind
from lightningrl_training.commands.train import train
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.run_sync import run_sync

ROOT = Path(__file__).resolve().parents[1]
QUICK = {
    "rewards.right.use": OF_EVERY_OTHER,
    "loop.steps": 2,
    "loop.tasks_per_step": 2,
    "loop.group_size": 2,
    "loop.checkpoint_every": 1,
    "validation.every": 0,
}


def each_call_alone(trajectory: lightningrl.Trajectory) -> list[str]:
    """A key of states, as a recipe in Python may name it."""
    return [f"{trajectory.rollout_id}/{call.index}" for call in trajectory.transitions]


@pytest.fixture(scope="module")
def project(first_agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run of two steps in it."""
    folder = tmp_path_factory.mktemp("user") / "first"
    shutil.copytree(first_agent, folder)
    steps: list[int] = []
    run = lightningrl.train(
        str(folder), run=folder / "runs" / "one", settings=QUICK, on_step=lambda report: steps.append(report.step)
    )
    assert steps == [1, 2]
    assert run.steps == 2
    return folder


@pytest.fixture
def moved(project: Path, tmp_path: Path) -> Iterator[Path]:
    """The user's folder, run included, somewhere else; where it was is nothing."""
    shutil.copytree(project, tmp_path / "elsewhere")
    project.rename(project.with_name("gone"))
    yield tmp_path / "elsewhere"
    project.with_name("gone").rename(project)


def test_a_run_is_read_from_its_folder(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert all(row["rollouts"] == 4 for row in run.metrics)
    assert run.recipe.loop.group_size == 2
    assert run.curve().stat().st_size > 1000
    rollouts = run.rollouts()
    assert len(rollouts) == 8
    trace = run.trace(rollouts[0].spec.id)
    assert trace.rollout.reward == rollouts[0].reward
    assert trace.calls[0].segments
    run.show(rollouts[0].spec.id)
    shown = capsys.readouterr().out
    assert f"reward {rollouts[0].reward:.3f}" in shown and "call 0" in shown
    with pytest.raises(lightningrl.LightningError, match=r"no run in 'nowhere'"):
        lightningrl.Run("nowhere")


def test_a_run_shows_itself(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    newest = run.rollouts()[0]
    assert newest.id == newest.spec.id and newest.output == newest.attempts[-1].output
    assert repr(newest).startswith(
        f"<rollout {newest.id!r}: succeeded, reward {newest.reward:.3f}, task {newest.task.id!r}, "
    )
    assert "\n" not in repr(newest) and len(repr(newest)) < 200
    page = run._repr_html_()
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture) == run.curve()._repr_png_() == (run.folder / "curve.png").read_bytes()
    assert "step 2 of 2" in page and f"<code>lightningrl view {run.folder}</code>" in page
    table = run.to_pandas()
    assert list(table.index) == [1, 2] and list(table["reward"]) == [row["reward"] for row in run.metrics]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(lightningrl.ConfigError, match=r"needs pandas .*; pip install pandas, or read"):
        run.to_pandas()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "the learning curve cannot be drawn" in run._repr_html_(), "a notebook shows the rest of it"


def test_weights_are_written_while_the_run_is_held_by_its_trainer(project: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    holder, _ = RunFolder.resume(run.folder, {})
    try:
        assert run.export(tmp_path / "weights") == 2
    finally:
        holder.close()
    before, after = (load_file(folder / "model.safetensors") for folder in (project / "starter", tmp_path / "weights"))
    assert before.keys() == after.keys()
    with pytest.raises(lightningrl.LightningError, match="is not empty"):
        run.export(tmp_path / "weights")
    with pytest.raises(lightningrl.ConfigError, match=r"no policy 'judge' is trained .* choose one of: policy"):
        run.export(tmp_path / "other", policy="judge")


@pytest.mark.parametrize(
    ("target", "form", "problem"),
    [
        ("other", {"gguf": "f16"}, r"writes a file, and '.*other' does not end in \.gguf"),
        ("other.gguf", {"gguf": "f16", "adapter": True}, r"leave out --adapter, or --gguf"),
        ("other.gguf", {"gguf": "f16", "dtype": "float16"}, r"leave out --dtype, or --gguf"),
        ("other.gguf", {"gguf": "q4_k"}, r"is written as f32, f16, bf16, q8_0, not as 'q4_k'"),
        ("other.gguf", {"gguf": "f16"}, r"has a tokenizer that llama\.cpp has no name for"),
        ("other", {"adapter": True}, r"all weights of this policy learned, so that there is no adapter"),
        ("other", {"push_to_hub": "no-owner"}, r"'no-owner' names no place of the hub; write OWNER/NAME"),
        ("other", {"push_to_hub": "me/mine"}, r"'me/mine' cannot be sent: this machine has no token of the hub"),
    ],
)
def test_a_form_that_weights_cannot_take_is_refused_in_a_sentence_and_nothing_is_left(
    target: str,
    form: dict[str, Any],
    problem: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(lightningrl.LightningError, match=problem):
        lightningrl.Run(project / "runs" / "one").export(tmp_path / target, **form)
    assert list(tmp_path.iterdir()) == []


def test_what_is_exported_stops_where_the_run_s_answers_ended_in_the_policy_s_own_dtype(
    moved: Path, tmp_path: Path, warm: WarmCommand
) -> None:
    """Of a base model: its end of text is another token than the one its chat template closes an answer with."""
    starter = moved / "starter"
    tokens = {one["content"]: one["id"] for one in json.loads((starter / "tokenizer.json").read_text())["added_tokens"]}
    closing, end = "<|im_end|>", next(name for name in tokens if not name.startswith("<|im_"))
    for name, changed in {
        "config.json": {"eos_token_id": tokens[end], "dtype": "bfloat16"},
        "generation_config.json": {"eos_token_id": tokens[end]},
        "tokenizer_config.json": {"eos_token": end},
    }.items():
        (starter / name).write_text(json.dumps(json.loads((starter / name).read_text()) | changed))
    run = lightningrl.Run(moved / "runs" / "one")
    run.export(tmp_path / "own")
    warm.run("lightningrl", "export", "whole", "--run", str(run.folder), "--dtype", "float32", cwd=tmp_path)
    for name, dtype in (("own", torch.bfloat16), ("whole", torch.float32)):
        generation = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [tokens[end], tokens[closing]]
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert {weight.dtype for weight in load_file(tmp_path / name / "model.safetensors").values()} == {dtype}
    with pytest.raises(
        lightningrl.LightningError, match=r"weights cannot be written as 'int8'; choose float32, bfloat16, float16"
    ):
        run.export(tmp_path / "other", dtype="int8")


def test_exported_weights_have_the_chat_template_that_they_were_trained_with(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "copy")
    frozen = tmp_path / "copy" / "runs" / "one" / "recipe.json"
    recipe = json.loads(frozen.read_text())
    frozen.write_text(json.dumps(recipe | {"policy": recipe["policy"] | {"chat_template": "hermes"}}))
    lightningrl.Run(frozen.parent).export(tmp_path / "weights")
    assert "<tool_response>" in AutoTokenizer.from_pretrained(tmp_path / "weights").chat_template


def test_a_checkpoint_that_goes_while_it_is_read_makes_room_for_the_next(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project, tmp_path / "copy")
    run = lightningrl.Run(tmp_path / "copy" / "runs" / "one")
    saved = sorted((run.folder / "checkpoints").iterdir())
    late = saved[-1].rename(saved[-1].with_name("later"))
    from lightningrl_training import policies

    load = policies.load_backend

    def load_late(backend: lightningrl.Backend, folder: Path, name: str) -> None:
        if late.exists():  # the trainer goes on: the newer one is there, this one is not
            late.rename(saved[-1])
            shutil.rmtree(folder.parent)
        load(backend, folder, name)

    monkeypatch.setattr(policies, "load_backend", load_late)
    assert run.export(tmp_path / "weights") == 2


def test_a_script_without_a_main_guard_ends_with_a_sentence_and_leaves_no_run(project: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import lightningrl\n"
        "from pathlib import Path\nfrom lightningrl_client.recipe_file import load_recipe\n"
        "def answer(task):\n    return '1'\n"
        f"recipe = load_recipe(Path({str(project / 'recipe.toml')!r}), {{'agent': answer, 'loop.steps': 1}})\n"
        "lightningrl.train(recipe, run='runs/mine')\n"
    )
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode
    last = ended.stderr.strip().rpartition("\n")[2]
    assert (
        "lightningrl.train is called while" in last and 'put the call under `if __name__ == "__main__":` there' in last
    )
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_run_with_the_same_seed_samples_the_same_tokens(project: Path, tmp_path: Path) -> None:
    def sampled(run: lightningrl.Run) -> dict[str, list[list[int]]]:
        traces = [run.trace(rollout.spec.id) for rollout in run.rollouts()]
        return {
            trace.rollout.spec.id: [shown.call.completion_ids.tolist() for shown in trace.calls] for trace in traces
        }

    run = lightningrl.Run(project / "runs" / "one")
    assert sampled(lightningrl.train(project, run=tmp_path / "again", settings=QUICK)) == sampled(run)
    assert sampled(lightningrl.train(project, run=tmp_path / "other", settings={**QUICK, "loop.seed": 1})) != sampled(
        run
    )


def test_a_run_that_was_moved_with_its_recipe_is_exported_and_goes_on(moved: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(moved / "runs" / "one")
    assert run.export(tmp_path / "weights") == 2
    went_on = lightningrl.train(run=run.folder, resume=True, settings={"loop.steps": 3})
    assert went_on.steps == 3
    (moved / "recipe.toml").rename(moved / "renamed.toml")
    with pytest.raises(
        lightningrl.LightningError, match=r"is gone; say where it is: `lightningrl train RECIPE --resume"
    ):
        lightningrl.train(run=run.folder, resume=True)
    assert lightningrl.train(moved / "renamed.toml", run=run.folder, resume=True, settings={"loop.steps": 3}).steps == 3


def test_a_run_that_was_moved_with_its_model_is_shown_as_text(moved: Path) -> None:
    run = lightningrl.Run(moved / "runs" / "one")
    rollout = run.rollouts()[0].spec
    kinds = {segment.kind for call in run.trace(rollout.id).calls for segment in call.segments}
    assert SegmentKind.USER in kinds, "its template is read"
    assert str(rollout.task.input) in "".join(
        segment.text for call in run.trace(rollout.id).calls for segment in call.segments
    )


def test_a_run_of_a_large_policy_says_what_a_step_will_take_before_the_first(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightningrl_torch.light.MOST_BYTES", 0)
    monkeypatch.setattr("lightningrl_torch.memory.LARGE", 1_000)
    lightningrl.train(project, run=tmp_path / "run", settings={**QUICK, "loop.steps": 1, "validation.every": 1})
    said = " ".join(capsys.readouterr().out.split())
    learns = re.search(r" policy: [\d,]+ parameters, all learn, lr 1e-3, float32, \d threads? ", said)
    assert learns is not None, said
    before, validated, first = (said.index(text) for text in ("forecast: ", "if each is like these", "step 1/1"))
    assert learns.start() < before < validated < first
    assert "if each samples one answer of sampling.max_tokens" in said[before:validated]


def test_a_run_that_keeps_rollouts_of_some_steps_forgets_the_others_and_goes_on(project: Path, tmp_path: Path) -> None:
    run = lightningrl.train(
        project, run=tmp_path / "run", settings={**QUICK, "loop.keep_rollouts": 1, "loop.keep_checkpoints": 1}
    )
    assert {one.trained_step for one in run.rollouts()} == {2}
    assert [row["step"] for row in run.metrics] == [1, 2]
    certificate = run.certify()
    assert certificate.is_passed
    assert any(
        "nothing is said of steps 1 to 1, whose rollouts were forgotten" in check.evidence
        for check in certificate.checks
    )
    said_now = {"loop.steps": 3, "learner.lora": False}  # what a large policy learned with before its size decided
    run = lightningrl.train(run=run.folder, resume=True, settings=said_now)
    assert {one.trained_step for one in run.rollouts()} == {3}


def test_training_within_an_event_loop_is_awaited(project: Path, tmp_path: Path) -> None:
    async def main() -> lightningrl.Run:
        training = asyncio.create_task(
            lightningrl.train_async(project, run=tmp_path / "run", settings={**QUICK, "loop.steps": 1})
        )
        others = 0
        while not training.done():
            await asyncio.sleep(0)
            others += 1
        assert others > 100, "others have their turns"
        return await training

    assert asyncio.run(main()).steps == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that run in the background inherit that an interrupt is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_a_notebook_cancels_the_training() -> None:
    ended = []
    notebook = threading.main_thread().ident
    assert notebook is not None

    async def training() -> None:
        asyncio.get_running_loop().call_later(0.05, lambda: signal.pthread_kill(notebook, signal.SIGINT))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    with pytest.raises(KeyboardInterrupt):
        run_sync(training())
    assert ended == ["in order"]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_before_the_training_has_begun_cancels_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        run_sync(asyncio.sleep(3600))


def test_an_agent_that_no_other_process_can_import_runs_in_this_one(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = {"client": OpenAI(api_key="none", max_retries=0)}

    def answer(question: str) -> str | None:
        if question.endswith("2, 2012"):
            raise RuntimeError("on fire")
        reply = cell["client"].chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
        return reply.choices[0].message.content

    recipe = lightningrl.Recipe(
        agent=answer,
        tasks=lightningrl.TasksConfig(train=lambda: ["April 1, 2012", "April 2, 2012"]),
        policy=lightningrl.PolicyConfig(model=str(project / "starter")),
        rewards={"right": lightningrl.RewardConfig(use=of_every_other)},
    )
    settings = {**{key: value for key, value in QUICK.items() if not key.startswith("rewards.")}, "loop.steps": 1}

    async def cell_of_a_notebook() -> lightningrl.Run:
        return lightningrl.train(recipe, run=tmp_path / "run", settings=settings)

    run = asyncio.run(cell_of_a_notebook())
    outcomes = {(record.spec.task.input, str(record.outcome)) for record in run.rollouts()}
    assert outcomes == {("April 1, 2012", "succeeded"), ("April 2, 2012", "agent_error")}
    (calls, *_) = [trace.calls for record in run.rollouts() if (trace := run.trace(record.spec.id)).calls]
    assert "April 1, 2012" in "".join(segment.text for segment in calls[0].segments)
    assert installed_redirection() is None
    with pytest.raises(lightningrl.ConfigError, match="cannot be found by a worker process"):
        lightningrl.train(recipe, run=tmp_path / "other", settings={**settings, "runtime.workers": 0})


def test_a_recorded_run_is_credited_anew(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    store = (run.folder / "store.sqlite").read_bytes()
    asked: list[str] = []

    async def longer(task: lightningrl.Task, output: str, trajectory: lightningrl.Trajectory) -> float:
        asked.append(trajectory.rollout_id)
        return 2.0 * of_every_other(task, output, trajectory)

    rewarded_anew = run.recredit("dr_grpo", settings={"rewards.right.use": longer}, steps=[2])
    assert len(asked) == len(rewarded_anew) == 4
    for one in rewarded_anew:
        assert one.step == 2
        assert (one.before.reward, one.after.reward) in {(0.0, 0.0), (1.0, 2.0)}
        assert all(
            values is not None and np.allclose(values, (one.after.reward or 0.0) - 1.0) for values in one.advantages
        )

    async def nobody_is_asked(self: RewardSet, *_: object) -> float:
        raise AssertionError("asked again")

    monkeypatch.setattr(RewardSet, "_call", nobody_is_asked)
    as_it_was = run.recredit()
    assert len(as_it_was) == 8
    assert {one.change for one in as_it_was} == {0.0}
    for one in run.recredit("reinforce"):
        assert one.after.reward == one.before.reward
        assert all(values is not None and np.allclose(values, one.after.reward or 0.0) for values in one.advantages)
        assert one.change > 0.0
    with pytest.raises(lightningrl.LightningError, match="no credit assigner named 'grop'"):
        run.recredit("grop")
    assert (run.folder / "store.sqlite").read_bytes() == store


def test_what_cannot_run_leaves_no_folder(project: Path, tmp_path: Path) -> None:
    with pytest.raises(lightningrl.ConfigError, match="no recipe given"):
        lightningrl.train(run=tmp_path / "run")
    with pytest.raises(lightningrl.LightningError, match="no credit assigner named 'grop'"):
        lightningrl.train(project, run=tmp_path / "run", settings={"credit.use": "grop"})
    assert not (tmp_path / "run").exists()


def test_a_curve_that_cannot_be_drawn_is_not_named_at_the_end_and_why_is_said_once(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in [found for found in sys.modules if found.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    settings = {**QUICK, "loop.steps": 1, "validation.every": 1, "validation.tasks": 2}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    train(project, run=tmp_path / "run", runs=tmp_path, settings=words)
    said = capsys.readouterr().out
    assert "done: 1 steps" in said and "lightningrl view" in said
    assert "curve.png" not in said
    assert (
        len([record for record in caplog.records if "the learning curve cannot be drawn" in record.getMessage()]) == 1
    )


def test_a_run_that_python_started_says_how_to_go_on(project: Path, tmp_path: Path, warm: WarmCommand) -> None:
    recipe = lightningrl.Recipe(
        agent=f"{project}/agent.py:answer",
        tasks=lightningrl.TasksConfig(train=f"{project}/tasks.py:train"),
        policy=lightningrl.PolicyConfig(model=str(project / "starter")),
        rewards={"right": lightningrl.RewardConfig(use=of_every_other)},
        credit=lightningrl.CreditConfig(use="states", options={"key": each_call_alone}),
    )
    settings = {key: value for key, value in QUICK.items() if not key.startswith("rewards.")}
    run = lightningrl.train(recipe, run=tmp_path / "run", settings={**settings, "loop.steps": 1})
    frozen = json.loads((run.folder / "recipe.json").read_text())
    assert frozen["rewards"]["right"]["use"].endswith(":of_every_other")
    assert frozen["credit"]["options"]["key"].endswith(":each_call_alone")
    resumed = warm.run(
        "lightningrl", "train", "--resume", "--run", str(run.folder), cwd=tmp_path, environment={"COLUMNS": "300"}
    )
    assert resumed.returncode == 1
    assert "lightningrl.train(recipe, run=" in resumed.stderr + resumed.stdout
    assert lightningrl.train(recipe, run=run.folder, resume=True, settings={"loop.steps": 2}).steps == 2


@pytest.fixture(scope="module")
def on_python_3_13(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a command, in an environment of its own that has what a notebook needs, in a folder with `first` in it."""
    folder = tmp_path_factory.mktemp("python-3.13")
    environment = {
        **os.environ,
        "PYENV_VERSION": "3.13",
        "UV_PYTHON_DOWNLOADS": "never",
        "PATH": f"{folder}/venv/bin:{os.environ['PATH']}",
        "JUPYTER_PLATFORM_DIRS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
    }

    def run(*command: str) -> str:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", "3.13", "venv")
    torch = f"torch=={version('torch').partition('+')[0]}"
    packages = (str(ROOT / "packages" / name) for name in ("core", "trainer-torch"))
    run(
        *uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        "venv/bin/python",
        torch,
        "openai",
        "ipykernel",
        "nbclient",
        *packages,
    )
    run("venv/bin/lightningrl", "init", "first")
    return run


@pytest.mark.long
def test_the_pages_script_trains_reads_and_exports_on_python_3_13(on_python_3_13: Callable[..., str]) -> None:
    page = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python title=train_first.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "weights of step 4" in on_python_3_13("venv/bin/python", "-c", script)
    on_python_3_13("test", "-f", "weights/model.safetensors", "-a", "-f", "runs/first/curve.png")


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
for cell in notebook.cells:
    cell.source = cell.source.replace("steps=10, tasks_per_step=8, group_size=8", "steps=2, tasks_per_step=4, group_size=4")
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
print(*(output.get("text") or output.get("data") for cell in notebook.cells for output in cell.get("outputs", ())), sys.version)
"""


@pytest.mark.long
def test_the_notebook_runs_on_python_3_13(on_python_3_13: Callable[..., str]) -> None:
    said = on_python_3_13("venv/bin/python", "-c", EXECUTE, str(ROOT / "examples" / "notebook" / "dates.ipynb"))
    assert "2/2" in said and "32 rollouts; the largest change" in said and "3.13." in said
