"""Metrics for MLflow, SwanLab, trackio and Weights & Biases: each run has an id there that a resume finds again.

A setting is the option's (`[logger_options.wandb]`), else the service's own variable (`WANDB_PROJECT`), else ours.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from lightningrl.errors import ConfigError, describe_raised
from lightningrl.files import write_durably
from lightningrl.recipe import Recipe
from lightningrl_runs.notes import read_notes
from lightningrl_runs.origin import flatten
from lightningrl_training.loggers.trackers import Tracker, check_package, import_package

__all__ = ["MlflowLogger", "SwanLabLogger", "TrackioLogger", "WandbLogger", "check_mlflow"]

logger = logging.getLogger(__name__)

PROJECT: Final = "lightningrl"
STEP: Final = "training_step"
LONGEST_PARAMETER: Final = 500
"""Characters of a parameter's value, of older MLflow servers."""
MOST_PARAMETERS: Final = 100
"""Parameters in one request."""
MOST_METRICS: Final = 1_000
"""Metrics in one request."""


class WandbLogger(Tracker):
    """Logs to Weights & Biases against `training_step`, so that steps run again after a resume overwrite nothing and
    are not refused. A run that goes on is the same run there."""

    def __init__(
        self,
        *,
        folder: Path,
        run: str,
        config: Mapping[str, Any],
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        mode: str | None = None,
    ) -> None:
        """`mode`: `online`, `offline` or `disabled`. Raises ConfigError when wandb cannot be imported."""
        wandb = import_package("wandb")
        everywhere = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
        self._run: Any = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=entity,
            name=name or os.environ.get("WANDB_NAME") or run,
            id=os.environ.get("WANDB_RUN_ID") or _run_id(folder / "wandb"),
            resume="allow",
            group=group,
            tags=_tags(folder, (*everywhere, *tags)) or None,
            mode=mode,
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric=STEP)
        super().__init__(self._run.finish)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})


class MlflowLogger(Tracker):
    """Logs to an MLflow server, without one to a database in the run's folder `mlflow`. The recipe's values are the
    run's parameters. A run that goes on is the same run there. What a server does not take is sent again with the next
    step, and no training ends for it."""

    def __init__(
        self,
        *,
        folder: Path,
        run: str,
        config: Mapping[str, Any],
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """Raises ConfigError when mlflow cannot be imported, or its server takes no run."""
        mlflow = import_package("mlflow")
        entities = import_package("mlflow", "mlflow.entities")
        home = _make(folder / "mlflow")
        # mlflow tries a server again for minutes, while the training loop waits
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = mlflow.MlflowClient(tracking_uri=given or f"sqlite:///{home.resolve() / 'mlflow.db'}")
        self._metric: Any = entities.Metric
        self._waiting: list[Any] = []
        self._warned = False
        title = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        artifacts = None if given else (home / "artifacts").resolve().as_uri()
        try:
            self._id = self._find(home / "run-id") or self._begin(home / "run-id", title, name or run, artifacts)
            self._describe(config, _tags(folder, tags), entities)
        except import_package("mlflow", "mlflow.exceptions").MlflowException as error:
            raise ConfigError(
                f"logger 'mlflow' cannot begin its run ({str(error)[:300]}); start the server, name another as "
                "logger_options.mlflow.tracking_uri, or remove the logger"
            ) from error
        super().__init__(self._end)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [
            self._metric(key=key, value=float(value), timestamp=now, step=step)
            for key, value in metrics.items()
            if math.isfinite(value)  # databases of MLflow have no NaN
        ]
        self._send()

    def _send(self) -> None:
        try:
            while self._waiting:
                self._client.log_batch(self._id, metrics=self._waiting[:MOST_METRICS])
                del self._waiting[:MOST_METRICS]
        except Exception as error:  # noqa: BLE001  each store of MLflow raises its own
            if not self._warned:
                logger.warning(
                    "MLflow does not take the run's metrics (%s); they are kept and sent again with later steps, and "
                    "are in metrics.jsonl",
                    describe_raised(error),
                )
            self._warned = True

    def _end(self) -> None:
        self._send()
        if not self._waiting:
            self._client.set_terminated(self._id)

    def _find(self, file: Path) -> str | None:
        """Find the run that an earlier process logged to, where the server still has it."""
        if not file.is_file():
            return None
        earlier = file.read_text(encoding="utf-8").strip()
        missing = import_package("mlflow", "mlflow.exceptions").MlflowException
        try:
            self._client.get_run(earlier)
        except missing as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return earlier

    def _begin(self, file: Path, experiment: str, run: str, artifacts: str | None) -> str:
        there = self._client.get_experiment_by_name(experiment)
        place = there.experiment_id if there else self._client.create_experiment(experiment, artifacts)
        begun = str(self._client.create_run(place, run_name=run).info.run_id)
        write_durably(file, begun)
        return begun

    def _describe(self, config: Mapping[str, Any], tags: list[str], entities: Any) -> None:
        """Say what the run is; a parameter that the run has already stays, as MLflow changes none."""
        present = self._client.get_run(self._id).data.params
        values = {key: value for key, value in flatten(config).items() if value not in (None, "", [], {})}
        new = [
            entities.Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in values.items() if key not in present
        ]
        for start in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[start : start + MOST_PARAMETERS])
        for tag in tags:
            self._client.set_tag(self._id, tag, "true")
        self._client.update_run(self._id, status="RUNNING")


class TrackioLogger(Tracker):
    """Keeps metrics in trackio's local database, or in a Space; `trackio show` opens it."""

    def __init__(
        self,
        *,
        folder: Path,
        run: str,
        config: Mapping[str, Any],
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
    ) -> None:
        """Raises ConfigError when trackio cannot be imported."""
        trackio = import_package("trackio")
        self._run: Any = trackio.init(
            project=project or os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=name or run,
            group=group,
            space_id=space_id,
            config=dict(config),
            resume="allow",
            embed=False,
        )
        super().__init__(self._run.finish)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)


class SwanLabLogger(Tracker):
    """Logs to SwanLab; without a mode into the run's folder `swanlab`, for `swanlab sync`."""

    def __init__(
        self,
        *,
        folder: Path,
        run: str,
        config: Mapping[str, Any],
        project: str | None = None,
        workspace: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        mode: str | None = None,
    ) -> None:
        """`mode`: `online`, `offline`, `local` or `disabled`. Raises ConfigError when swanlab cannot be imported."""
        swanlab = import_package("swanlab")
        mode = mode or os.environ.get("SWANLAB_MODE") or "offline"
        home = _make(folder / "swanlab")
        self._run: Any = swanlab.init(
            project=project or os.environ.get("SWANLAB_PROJECT") or PROJECT,
            workspace=workspace,
            name=name or run,
            group=group,
            tags=_tags(folder, tags) or None,
            log_dir=str(home),
            mode=mode,
            config=dict(config),
            **({"id": _run_id(home), "resume": "allow"} if mode == "online" else {}),
        )
        super().__init__(self._run.finish)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)


def check_mlflow(name: str, recipe: Recipe) -> None:
    """Raise ConfigError where mlflow is not installed, or the recipe holds a server's password."""
    check_package(name, recipe)
    if urlsplit(str(recipe.logger_options.get(name, {}).get("tracking_uri", ""))).password is not None:
        raise ConfigError(
            "logger_options.mlflow.tracking_uri holds a password, and a recipe is copied into its run folder; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole as MLFLOW_TRACKING_URI"
        )


def _make(home: Path) -> Path:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def _run_id(home: Path) -> str:
    """Read the id that a run has at a service; it is drawn when the run begins."""
    file = _make(home) / "run-id"
    if not file.is_file():
        write_durably(file, uuid.uuid4().hex[:12])
    return file.read_text(encoding="utf-8").strip()


def _tags(folder: Path, given: tuple[str, ...] | list[str]) -> list[str]:
    """Tags of the recipe and of the run's notes, each once."""
    return list(dict.fromkeys([*given, *read_notes(folder).tags]))
