"""Metric sinks: on disk when `log` returns, and a sentence for what is not installed."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lightningrl import MetricLogger
from lightningrl.errors import ConfigError, PluginError, RunFolderError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.recipe import Recipe
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_client.runtime.launcher import WorkerPlan
from lightningrl_client.runtime.recipe_pool import start_pool
from lightningrl_runs.metrics import read_metrics
from lightningrl_training.agent_check import check_agent
from lightningrl_training.loggers import JsonlLogger


def build(name: str, folder: Path) -> MetricLogger:
    logger = load_plugins().find("lightningrl_loggers", name)
    built: MetricLogger = logger.build(folder=folder, run="run-1", config={"loop": {"steps": 3}})
    return built


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_log_is_a_line_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {"reward": 0.5, "groups": 3})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["reward"], line["groups"], len(synced)) == (1, 0.5, 3, 1)
    logger.close()
    logger.close()


def test_numbers_that_json_cannot_say_are_null(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    logger.close()
    assert lines(tmp_path / "metrics.jsonl")[0] | {"time": 0} == {"step": 1, "time": 0, "a": None, "b": None, "c": 1.0}
    assert read_metrics(tmp_path / "metrics.jsonl")[0].keys() == {"step", "time", "c"}


def test_unfinished_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "rew')
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    logger = JsonlLogger(path)
    logger.log(2, {"reward": 0.2})
    logger.close()
    assert [(entry["step"], entry["reward"]) for entry in lines(path)] == [(1, 0.1), (2, 0.2)]


def test_steps_that_will_run_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    for step in range(5):
        logger.log(step, {"reward": step / 10})
    logger.close()
    JsonlLogger(path, resume_after=2).close()
    assert [entry["step"] for entry in lines(path)] == [0, 1, 2]


def test_parts_of_a_step_are_joined_and_the_last_value_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(2, {"reward": 0.2})
    logger.log(1, {"reward": 0.1})
    logger.log(2, {"validation/reward": 0.7, "reward": 0.3})
    logger.close()
    assert [{key: value for key, value in entry.items() if key != "time"} for entry in read_metrics(path)] == [
        {"step": 1, "reward": 0.1},
        {"step": 2, "reward": 0.3, "validation/reward": 0.7},
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_a_sentence() -> None:
    logger = JsonlLogger(Path("/dev/full"))
    with pytest.raises(RunFolderError, match=r"metrics cannot be written to '/dev/full': .*No space left.*--resume"):
        logger.log(1, {"reward": 1.0})
    logger.close()


def test_folder_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="metrics cannot be written"):
        JsonlLogger(tmp_path / "nowhere" / "metrics.jsonl")


def test_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(RunFolderError, match=r"line 2 of .* is no metrics entry"):
        read_metrics(path)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build("tensorboard", tmp_path)
    assert isinstance(logger, MetricLogger)
    for step in (1, 2):
        logger.log(step, {"reward": step / 4, "validation/reward": 0.5})
    logger.close()
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("reward")] == [
        (1, 0.25),
        (2, 0.5),
    ]


class FakeRun:
    """Stands in for a wandb or trackio run."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[Any] = []

    def define_metric(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(("define", arguments, options))

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_steps_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    runs: list[FakeRun] = []
    module = types.ModuleType(name)
    module.init = lambda **options: runs.append(FakeRun(**options)) or runs[-1]  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, name, module)
    logger = build(name, tmp_path)
    logger.log(3, {"reward": 0.5})
    logger.close()
    logger.close()
    (run,) = runs
    assert (run.options["name"], run.options["config"], run.options["project"]) == (
        "run-1",
        {"loop": {"steps": 3}},
        "lightningrl",
    )
    expected = ({"reward": 0.5, "training_step": 3}, None) if name == "wandb" else ({"reward": 0.5}, 3)
    assert run.calls[-2:] == [expected, "finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow", "swanlab"])
def test_logger_that_is_not_installed_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [name, *(found for found in sys.modules if found.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"logger '{name}' cannot be imported.*`pip install {name}`"):
        build(name, tmp_path)


def test_unknown_logger_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"no logger named 'tensorbord'; installed: .*; did you mean 'tensorboard'"):
        build("tensorbord", tmp_path)


class Brought:
    """A package with a logger that has a key of its own, and with a launcher that keeps the plan of its workers."""

    def __init__(self) -> None:
        self.plan = WorkerPlan(settings=None)  # type: ignore[arg-type]

    @hookimpl
    def lightningrl_loggers(self) -> list[Plugin]:
        return [Plugin(name="mine", summary="a test", factory=FakeRun, secrets=("MINE_TOKEN",))]

    @hookimpl
    def lightningrl_worker_launchers(self) -> list[Plugin]:
        return [Plugin(name="mine", summary="a test", factory=lambda: self)]

    async def start(self, count: int, plan: WorkerPlan) -> None:
        self.plan = plan
        raise ConfigError("the plan is enough")

    async def stop(self, grace_s: float) -> None: ...

    def describe(self) -> str:
        return "nowhere"


@pytest.mark.parametrize("loggers", [("mine",), ()])
async def test_a_logger_plugins_keys_reach_no_agent_of_a_run_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loggers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MINE_TOKEN", "secret")
    (tmp_path / "agent.py").write_text("import os\nassert not os.environ.get('MINE_TOKEN')\ndef answer(task): ...\n")
    (tmp_path / "recipe.toml").write_text(
        'agent = "agent.py:answer"\n[tasks]\ntrain = "data.jsonl"\n[policy]\nmodel = "model"\n'
        '[rewards.right]\nuse = "exact_match"\n'
    )
    recipe, brought, plugins = load_recipe(tmp_path / "recipe.toml", {"loggers": loggers}), Brought(), load_plugins()
    plugins.register(brought, distribution="mine 1")
    assert _agent_problem(recipe, plugins) == ("" if loggers else "AssertionError")
    shared = with_settings(recipe, {"runtime.environment": ["MINE_TOKEN"]})
    assert _agent_problem(shared, plugins) == "AssertionError"
    pool = start_pool(with_settings(recipe, {"runtime.launcher": "mine"}), "http://127.0.0.1:1", "key", None, plugins)
    assert pool is not None
    with pytest.raises(ConfigError):
        await pool.start()
    assert brought.plan.settings.withheld == (("MINE_TOKEN",) if loggers else ())


def _agent_problem(recipe: Recipe, plugins: PluginManager) -> str:
    with check_agent(recipe, plugins) as wait:
        try:
            wait()
        except ConfigError as error:
            return "AssertionError" if "AssertionError" in str(error) else str(error)
    return ""
