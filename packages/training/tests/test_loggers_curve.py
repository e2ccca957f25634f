"""The learning curve is drawn from `metrics.jsonl`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import PolicyConfig, RewardConfig, TasksConfig
from lightningrl_client.recipe_file import with_settings
from lightningrl_training.loggers import JsonlLogger, draw_curve
from lightningrl_training.run import Run

PNG = b"\x89PNG\r\n\x1a\n"
RECIPE = Recipe(
    agent="agent.py:answer",
    tasks=TasksConfig(train="data.py:train"),
    policy=PolicyConfig(model="m"),
    rewards={"right": RewardConfig(use="reward.py:right")},
)


def write_metrics(path: Path, *, steps: int = 40, gain: float = 1.0) -> Path:
    logger = JsonlLogger(path)
    for step in range(steps + 1):
        if step:
            logger.log(
                step, {"reward": 0.3 + gain * 0.5 * step / 40 + 0.08 * ((step * 7) % 5 - 2) / 2, "minutes": step * 0.09}
            )
        if step % 10 == 0:
            logger.log(step, {"validation/reward": 0.35 + gain * 0.5 * (step / 40) ** 0.5, "minutes": step * 0.09})
    logger.close()
    return path


def test_curve_with_control_is_a_picture(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl")
    control = write_metrics(tmp_path / "control.jsonl", gain=0.0)
    assert draw_curve(metrics, tmp_path / "curve.png", title="text-to-SQL", control_path=control)
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control.jsonl", "curve.png", "metrics.jsonl"]


@pytest.mark.parametrize(
    "metrics",
    [[{"validation/reward": 0.4}], [{"reward": 0.4}], [{"reward": -3.0}, {"reward": 12.0}], [{"reward": 0.5}] * 2],
)
def test_little_or_unusual_data_is_drawn_without_warnings(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step, values in enumerate(metrics):
        logger.log(step, values)
    logger.close()
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_the_legend_says_how_the_recipe_samples_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    said: list[str] = []
    save = Figure.savefig

    def read_and_save(figure: Figure, *args: Any, **options: Any) -> None:
        legend = figure.axes[0].get_legend()
        said.append(legend.get_texts()[-1].get_text() if legend else "")
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", read_and_save)
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps=10)
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    for temperature in (0.0, 0.7):
        recipe = with_settings(RECIPE, {"validation.sampling.temperature": temperature})
        (tmp_path / "recipe.json").write_text(recipe.frozen_text(), encoding="utf-8")
        Run(tmp_path).curve()
    draw_curve(metrics, tmp_path / "curve.png")
    ways = ("greedy, ", "temperature 0.7, ", "")
    assert said == [f"validation score ({way}unseen tasks)" for way in ways]


@pytest.mark.parametrize(("minutes", "unit"), [(0.02, "seconds"), (0.5, "minutes")])
def test_times_of_a_short_run_differ_and_no_line_runs_below_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, unit: str
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep_and_save(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep_and_save)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step in range(16):
        logger.log(
            step, {"reward": 0.9 - 0.05 * step, "validation/reward": 0.9 - 0.05 * step, "minutes": minutes * step}
        )
    logger.close()
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", validation_temperature=0.0)
    ((axes, *_),) = [figure.axes for figure in drawn]
    (above,) = axes.child_axes
    assert above.get_xlabel() == unit
    shown = [label.get_text() for label in above.get_xticklabels()]
    assert len(shown) == len(set(shown)) > 3
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().y1 <= axes.get_window_extent().y0


def test_nothing_to_draw_yet_draws_nothing(tmp_path: Path) -> None:
    JsonlLogger(tmp_path / "metrics.jsonl").close()
    assert not draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_picture_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps=2)
    with pytest.raises(RunFolderError, match="the learning curve cannot be written"):
        draw_curve(metrics, tmp_path / "nowhere" / "curve.png")


def test_missing_matplotlib_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", steps=2)
    for name in [found for found in sys.modules if found.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'lightningrl\[plot\]'"):
        draw_curve(metrics, tmp_path / "curve.png")


def test_importing_the_loggers_imports_nothing_heavy() -> None:
    heavy = ("matplotlib", "tensorboard", "wandb", "trackio", "torch")
    program = f"import sys, lightningrl_training.loggers; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert result.stdout.strip() == "[]"
