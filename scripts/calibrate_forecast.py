"""Train many small policies and fit the forecast of `lightningrl forecast` to what became of them.

    python scripts/calibrate_forecast.py train FOLDER     runs and rehearsals, a JSON line each; goes on where it was
    python scripts/calibrate_forecast.py fit FOLDER       writes packages/training/…/forecast/calibration.json
    python scripts/calibrate_forecast.py show             what the committed file says of itself

The runs are listed in `forecast_runs.py`, beforehand; none is left out but one that raised. Coefficients are fitted to
gains on tasks held out, of small policies; intervals to gains as a run sees them, last quarter less first step.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from forecast_runs import FRESH, PRETRAINED_POLICY, ROOT
from forecast_training import REHEARSALS, RUNS, make_runs
from torch.nn.functional import huber_loss

from lightningrl_training.forecast.evidence import Evidence
from lightningrl_training.forecast.history import spearman
from lightningrl_training.forecast.prediction import (
    CALIBRATION,
    Calibration,
    GainForecast,
    features,
    most_gain,
    predict,
)
from lightningrl_training.forecast.record import Outcome

RIDGE = 1e-3
HUBER = 0.05
"""Error of a gain from which on it counts by its size, no longer by its square: a run that falls apart is one run."""
APART = -0.05
"""Gain below which a run has fallen apart."""
WIDTH = (0.05, 0.3)
"""Width of an interval before it is calibrated: least, and downwards by the spread of rewards within groups."""
TARGET = ROOT / "packages/training/src/lightningrl_training/forecast" / CALIBRATION
COMMAND = "python scripts/calibrate_forecast.py train FOLDER; python scripts/calibrate_forecast.py fit FOLDER"


@dataclass(frozen=True)
class Line:
    """A run that was made, and what it was."""

    row: dict[str, Any]
    evidence: Evidence
    rehearsed: Evidence | None
    """With a rehearsal; None = none was made."""
    gain: float
    """On tasks held out."""
    seen: float
    """As the run sees it."""

    @property
    def family(self) -> str:
        return str(self.row["family"])


def fit(folder: Path) -> None:
    """Fit all runs, and say what the fit is worth on families that it has not seen."""
    lines = _read(folder)
    families = sorted({line.family for line in lines})
    unseen = {family: _fit_both([line for line in lines if line.family != family]) for family in families}
    plain = {line.row["name"]: predict(line.evidence, unseen[line.family]) for line in lines}
    again = [(line, line.rehearsed) for line in lines if line.rehearsed is not None]
    rehearsed = {line.row["name"]: predict(evidence, unseen[line.family]) for line, evidence in again}
    made = _fit_both(lines)
    assert made.rehearsed is not None
    whole = _told(made, lines, plain)
    whole = whole.model_copy(update={"rehearsed": _told(made.rehearsed, [line for line, _ in again], rehearsed)})
    table = [
        {
            **{key: line.row[key] for key in ("name", "policy", "draw")},
            **{key.rpartition(".")[2]: value for key, value in line.row["settings"].items()},
            "gain": line.gain,
            "seen": line.seen,
            "forecast": plain[line.row["name"]].model_dump(),
            **({"rehearsed": rehearsed[line.row["name"]].model_dump()} if line.rehearsed else {}),
        }
        for line in lines
    ]
    numbers = json.loads(whole.model_dump_json())
    text = ",\n".join(json.dumps(_rounded(row)) for row in table)
    TARGET.write_text(json.dumps(_rounded(numbers), indent=1)[:-2] + ',\n "table": [\n' + text + "\n]}\n")
    show()


def _read(folder: Path) -> list[Line]:
    runs, rehearsals = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()] for name in (RUNS, REHEARSALS)
    )
    again = {row["name"]: Evidence.model_validate(row["evidence"]) for row in rehearsals if row["evidence"]}
    return [
        Line(
            row=row,
            evidence=Evidence.model_validate(row["evidence"]),
            rehearsed=again.get(row["name"]),
            gain=row["gain"],
            seen=Outcome.model_validate(row["outcome"]).gain,
        )
        for row in runs
        if row["evidence"] and row["outcome"]
    ]


def _told(fitted: Calibration, lines: Sequence[Line], forecasts: Mapping[str, GainForecast]) -> Calibration:
    """Write what forecasts of unseen families were worth into a calibration."""
    made = [forecasts[line.row["name"]] for line in lines]
    return fitted.model_copy(
        update={
            "runs": len(lines),
            "families": len({line.family for line in lines}),
            "spearman": spearman([one.gain for one in made], [line.gain for line in lines]) or 0.0,
            "coverage": fmean(one.low <= line.seen <= one.high for one, line in zip(made, lines, strict=True)),
            "error": float(np.median([abs(one.gain - line.gain) for one, line in zip(made, lines, strict=True)])),
        }
    )


def show() -> None:
    """Print what the committed file says of itself."""
    made = json.loads(TARGET.read_text())
    print(f"{made['runs']} runs of {made['families']} families, each forecast by the others")
    _show(made["table"], "forecast")
    again = [row for row in made["table"] if "rehearsed" in row]
    print(f"\nwith a rehearsal, {len(again)} of them:")
    _show(again, "rehearsed")
    print("\nthe same runs without:")
    _show(again, "forecast")


def _show(rows: Sequence[dict[str, Any]], how: str) -> None:
    """`how`: the key of the forecast."""
    steady = [row for row in rows if row["gain"] >= APART]
    print(f"rank correlation with the gain on tasks held out: {_rank(rows, how, 'gain')}")
    print(f"  without the {len(rows) - len(steady)} runs that fell apart: {_rank(steady, how, 'gain')}")
    print(f"  with the gain as the run sees it, a quarter of its steps less the first: {_rank(rows, how, 'seen')}")
    fresh = [row for row in rows if row["draw"] in FRESH]
    print(f"  of {len(fresh)} runs of draws {FRESH}: {_rank(fresh, how, 'gain')}")
    kinds = {
        "SmolLM2": (PRETRAINED_POLICY,),
        "policies with a habit": ("form", "habit"),
        "hidden knowledge": ("hidden",),
    }
    for kind, policies in kinds.items():
        own, others = ([row for row in rows if (row["policy"] in policies) == is_in] for is_in in (True, False))
        print(f"  of {len(own)} runs of {kind}: {_rank(own, how, 'gain')}; of the others: {_rank(others, how, 'gain')}")
    for rate in sorted({row["learning_rate"] for row in rows}):
        own = [row for row in rows if row["learning_rate"] == rate]
        apart = sum(row["gain"] < APART for row in own)
        print(f"  of {len(own)} runs at learning rate {rate:g}, {apart} of which fell apart: {_rank(own, how, 'gain')}")
    print(
        f"within the 90 % interval: as runs see them {_within(rows, how, 'seen')}; on tasks held out "
        f"{_within(rows, how, 'gain')}"
    )
    width = fmean(row[how]["high"] - row[how]["low"] for row in rows)
    error = float(np.median([abs(row[how]["gain"] - row["gain"]) for row in rows]))
    print(f"mean width of an interval {width:.3f}, median error {error:.3f}")


def _within(rows: Sequence[dict[str, Any]], how: str, which: str) -> str:
    held = sum(row[how]["low"] <= row[which] <= row[how]["high"] for row in rows)
    return f"{held} of {len(rows)} ({100 * held / len(rows):.1f} %)"


def _rank(rows: Sequence[dict[str, Any]], how: str, which: str) -> str:
    rank = spearman([row[how]["gain"] for row in rows], [row[which] for row in rows])
    return "-" if rank is None else f"{rank:.2f}"


def _fit_both(lines: Sequence[Line]) -> Calibration:
    """Fit forecasts without a rehearsal, and those with one."""
    plain = _fit([(line, line.evidence) for line in lines])
    shown = [(line, line.rehearsed) for line in lines if line.rehearsed and line.rehearsed.rehearsed]
    return plain.model_copy(update={"rehearsed": _fit(shown)})


def _fit(made: Sequence[tuple[Line, Evidence]]) -> Calibration:
    """Coefficients by `_regress`; the interval by residuals of families, each left out in its turn."""
    below, above = [], []
    for family in sorted({line.family for line, _ in made}):
        model = _regress([each for each in made if each[0].family != family])
        for line, evidence in made:
            if line.family == family:
                told = predict(evidence, model).gain
                down, up = model.widths(evidence, told)
                below.append((line.seen - told) / down)
                above.append((line.seen - told) / up)
    ends = (np.quantile(below, 0.05, method="weibull"), np.quantile(above, 0.95, method="weibull"))
    return _regress(made).model_copy(update={"residuals": (float(ends[0]), float(ends[1]))})


def _regress(made: Sequence[tuple[Line, Evidence]]) -> Calibration:
    """Logistic regression of what is left to gain, by Huber's loss and a ridge."""
    evidence = [each for _, each in made]
    moved = float(np.median([one.moved for one in evidence if one.moved is not None] or [0.0]))
    rows = [features(one) for one in evidence]
    names = sorted(name for name in rows[0] if len({row[name] for row in rows}) > 1)
    values = torch.tensor([[row[name] for name in names] for row in rows], dtype=torch.float64)
    most = torch.tensor([most_gain(one, moved) for one in evidence], dtype=torch.float64)
    means, scales = values.mean(0), values.std(0) + 1e-6
    x, y = (values - means) / scales, torch.tensor([line.gain for line, _ in made], dtype=torch.float64)
    weights = torch.zeros(len(names) + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def error() -> torch.Tensor:
        optimizer.zero_grad()
        told = most * torch.sigmoid(x @ weights[1:] + weights[0])
        loss = huber_loss(told, y, delta=HUBER) / HUBER + RIDGE * (weights[1:] ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(error)  # type: ignore[no-untyped-call]
    slopes = weights.detach()[1:] / scales
    return Calibration(
        command=COMMAND,
        runs=len(rows),
        families=0,
        spearman=0.0,
        coverage=0.0,
        error=0.0,
        bias=float(weights.detach()[0] - slopes @ means),
        coefficients=dict(zip(names, slopes.tolist(), strict=True)),
        residuals=(0.0, 0.0),
        width=WIDTH,
        moved=moved,
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "fit", "show"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/forecast"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.what == "train":
        make_runs(arguments.folder)
    elif arguments.what == "fit":
        fit(arguments.folder)
    else:
        show()


if __name__ == "__main__":
    main()
