"""The learning curve is drawn from `metrics.jsonl`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.loggers import JsonlLogger, draw_curve

PNG = b"\x89PNG\r\n\x1a\n"


def write_metrics(path: Path, *, steps: int = 40, gain: float = 1.0) -> Path:
    logger = JsonlLogger(path)
    for step in range(steps + 1):
        if step:
            logger.log(step, {"reward": 0.3 + gain * 0.5 * step / 40 + 0.08 * ((step * 7) % 5 - 2) / 2, "minutes": step * 0.09})
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
    "metrics", [[{"validation/reward": 0.4}], [{"reward": 0.4}], [{"reward": -3.0}, {"reward": 12.0}], [{"reward": 0.5}] * 2]
)
def test_little_or_unusual_data_is_drawn_without_warnings(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step, values in enumerate(metrics):
        logger.log(step, values)
    logger.close()
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


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
    program = f"import sys, lightningrl.loggers; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert result.stdout.strip() == "[]"
