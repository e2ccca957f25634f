"""Loggers of services: options of the recipe, one run over resumes, and what the services' own readers find.

MLflow, SwanLab, trackio and wandb are in no group of ours: their tests run where they are installed
(`pip install mlflow swanlab trackio wandb`), without an account or a net.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
import sys
import time
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightningrl import MetricLogger
from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.checks import check_logger_options
from lightningrl_training.loggers.services import check_mlflow

pytestmark = pytest.mark.filterwarnings("default")
"""The services' own deprecations are theirs."""

RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.jsonl"
[policy]
model = "model"
[rewards.right]
use = "exact_match"
"""


def begin(logger: str, folder: Path, **options: Any) -> MetricLogger:
    config = {"loop": {"steps": 3}, "adapters": ["langchain"], "store_url": None}
    plugin = load_plugins().find("lightningrl_loggers", logger)
    built: MetricLogger = plugin.build(folder=folder, run="run-1", config=config, **options)
    return built


def log_and_resume(name: str, folder: Path, **options: Any) -> None:
    """Log steps 1 and 2, end, then go on with 2 and 3, as a run does that was killed after its last checkpoint."""
    (folder / "notes.json").write_text('{"tags": ["noted"], "note": ""}')
    for first in (1, 2):
        logger = begin(name, folder, **options)
        for step in (first, first + 1):
            logger.log(step, {"reward": step / 4, "learn/loss": float("nan")})
        logger.close()
        logger.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder and working directory of nobody."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_mlflow_has_one_run_with_parameters_tags_and_steps(home: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    log_and_resume("mlflow", home, experiment="agents", tags=["mine"])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("agents").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-1", "FINISHED")
    assert run.data.params == {"loop.steps": "3", "adapters": "['langchain']"}
    assert {"mine", "noted"} <= run.data.tags.keys()
    history = client.get_metric_history(run.info.run_id, "reward")
    assert {(metric.step, metric.value) for metric in history} == {(1, 0.25), (2, 0.5), (3, 0.75)}
    assert sorted(path.name for path in home.parent.iterdir() if path.name != "home") == ["run"]


def test_mlflow_that_does_not_answer_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"logger 'mlflow' cannot begin its run \(.*\); start the server, name ano"):
        begin("mlflow", home, tracking_uri="http://127.0.0.1:9")


def test_what_mlflow_refuses_is_sent_with_the_next_step(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    logger = begin("mlflow", home)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: 1 / 0)
        logger.log(1, {"reward": 0.25})
        logger.log(2, {"reward": 0.5})
    (warning,) = [record for record in caplog.records if record.name.startswith("lightningrl")]
    assert warning.message.startswith("MLflow does not take the run's metrics (ZeroDivisionError")
    logger.log(3, {"reward": 0.75})
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow' / 'mlflow.db'}")
    history = client.get_metric_history((home / "mlflow" / "run-id").read_text(), "reward")
    assert [metric.step for metric in history] == [1, 2, 3]


def test_wandb_offline_has_one_id_over_a_resume(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_TAGS", "everywhere")
    monkeypatch.setenv("WANDB_PROJECT", "agents")
    log_and_resume("wandb", home, mode="offline", tags=["mine"])
    ours = (home / "wandb" / "run-id").read_text()
    first, second = sorted((home / "wandb").glob(f"offline-run-*-{ours}/run-{ours}.wandb"))
    for file, steps in ((first, [("1", "0.25"), ("2", "0.5")]), (second, [("2", "0.5"), ("3", "0.75")])):
        records = read_when_ended(file)
        run, *_ = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == (ours, "agents", "run-1")
        assert list(run.tags) == ["everywhere", "mine", "noted"]
        assert {"loop", "adapters"} <= {item.key for item in run.config.update}
        history = [{key_of(item): item.value_json for item in record.history.item} for record in records]
        assert [(row["training_step"], row["reward"]) for row in history if row] == steps


def read_when_ended(file: Path) -> list[Any]:
    """Read a run of wandb once its own process has written the end."""
    for _ in range(100):
        records = read_wandb(file)
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    return records


def read_wandb(file: Path) -> list[Any]:
    """Read the records of a run of wandb: parts of 7 bytes (crc, length, kind) and content, in blocks of 32 KiB."""
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    content, position, whole, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if (left := 32_768 - position % 32_768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            records.append(record.FromString(whole))
            whole = b""
    return records


def key_of(item: Any) -> str:
    return str(item.key or "/".join(item.nested_key))


def test_trackio_goes_on_with_the_same_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trackio.utils")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    log_and_resume("trackio", home, project=f"lightningrl-test-{home.parent.name}")
    place = Path(storage.get_project_db_path(f"lightningrl-test-{home.parent.name}"))
    assert Path(utils.TRACKIO_DIR) in place.parents
    try:
        with closing(sqlite3.connect(place)) as db:
            rows = db.execute("select run_name, step, metrics from metrics order by id").fetchall()
        assert [(run, step, json.loads(text)["reward"]) for run, step, text in rows] == [
            ("run-1", 1, 0.25),
            ("run-1", 2, 0.5),
            ("run-1", 2, 0.5),
            ("run-1", 3, 0.75),
        ]
    finally:
        place.unlink()


def test_swanlab_writes_into_the_run(home: Path) -> None:
    pytest.importorskip("swanlab")
    log_and_resume("swanlab", home, project="agents", tags=["mine"])
    first, second = (home / "swanlab").glob("run-*/run-*.swanlab")
    for content in (first.read_bytes(), second.read_bytes()):
        assert all(word in content for word in (b"agents", b"run-1", b"mine", b"noted", b"reward"))


class Recorded:
    """Stands in for the run of wandb or swanlab: it takes all and keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_options_come_before_variables_and_variables_before_ours(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    module = types.ModuleType("wandb")
    module.init = lambda **options: begun.append(options) or Recorded()  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    begin("wandb", home)
    monkeypatch.setenv("WANDB_PROJECT", "of-the-shell")
    begin("wandb", home)
    begin("wandb", home, project="of-the-recipe", name="mine", tags=["a", "a"], entity="us", mode="offline")
    assert [options["project"] for options in begun] == ["lightningrl", "of-the-shell", "of-the-recipe"]
    assert len({options["id"] for options in begun}) == 1
    assert begun[-1].items() >= {"name": "mine", "tags": ["a"], "entity": "us", "mode": "offline"}.items()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"wandb": {"projekt": "a"}}, r"logger_options.wandb has no setting 'projekt'; did you mean 'project'\?"),
        ({"wandb": {"tags": "a"}}, r"logger_options.wandb.tags is 'a': Input should be a valid tuple"),
        ({"wandb": {"folder": "a"}}, r"logger_options.wandb has no setting 'folder'"),
        ({"wandbb": {}}, r"no logger named 'wandbb'; installed: .*; did you mean 'wandb'\?"),
    ],
)
def test_an_option_that_a_logger_does_not_have_is_a_sentence(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml", {"logger_options": options})
    (name,) = options
    with pytest.raises((ConfigError, PluginError), match=sentence):
        check_logger_options(name, recipe, load_plugins())


def test_a_password_in_a_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    options = {"mlflow": {"tracking_uri": "https://me:secret@host"}}
    recipe = load_recipe(tmp_path / "recipe.toml", {"logger_options": options})
    with pytest.raises(ConfigError, match=r"tracking_uri holds a password.*MLFLOW_TRACKING_PASSWORD") as refused:
        check_mlflow("mlflow", recipe)
    assert "secret" not in str(refused.value)
