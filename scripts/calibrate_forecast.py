"""Train many small policies and fit the forecast of `lightningrl forecast` to what became of them.

    python scripts/calibrate_forecast.py train FOLDER     a JSON line per run in FOLDER/runs.jsonl; goes on where it was
    python scripts/calibrate_forecast.py fit FOLDER       writes packages/training/…/forecast/calibration.json
    python scripts/calibrate_forecast.py show             what the committed file says of itself, family by family

The runs are listed in `forecast_runs.py`, beforehand; none is left out but one that raised.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from forecast_runs import ROOT, train

from lightningrl_training.forecast.evidence import Evidence
from lightningrl_training.forecast.history import spearman
from lightningrl_training.forecast.prediction import CALIBRATION, Calibration, features, predict
from lightningrl_training.forecast.record import Outcome

RIDGE = 5.0
WIDTH = (0.05, 0.3)
"""Width of an interval before it is calibrated: least, and by the spread of rewards within groups."""
TARGET = ROOT / "packages/training/src/lightningrl_training/forecast" / CALIBRATION
COMMAND = "python scripts/calibrate_forecast.py train FOLDER; python scripts/calibrate_forecast.py fit FOLDER"


def fit(folder: Path) -> None:
    """Fit all runs, and say what the fit is worth on families that it has not seen."""
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row["evidence"] and row["outcome"]]
    evidence = [Evidence.model_validate(row["evidence"]) for row in rows]
    gains = [Outcome.model_validate(row["outcome"]).gain for row in rows]
    families = [row["family"] for row in rows]
    forecasts = [
        predict(one, _fit(evidence, gains, families, without={family}))
        for one, family in zip(evidence, families, strict=True)
    ]
    whole = _fit(evidence, gains, families, without=set())
    rank = spearman([forecast.gain for forecast in forecasts], gains)
    holds = [forecast.low <= gain <= forecast.high for forecast, gain in zip(forecasts, gains, strict=True)]
    errors = [abs(forecast.gain - gain) for forecast, gain in zip(forecasts, gains, strict=True)]
    told = {"spearman": rank or 0.0, "coverage": fmean(holds), "error": float(np.median(errors))}
    made = whole.model_copy(update={"runs": len(rows), "families": len(set(families)), **told})
    table = [
        {
            "name": row["name"],
            "policy": row["policy"],
            **{key.rpartition(".")[2]: value for key, value in row["settings"].items()},
            "gain": gain,
            "forecast": forecast.model_dump(),
            "features": features(one, whole.moved),
        }
        for row, one, gain, forecast in zip(rows, evidence, gains, forecasts, strict=True)
    ]
    numbers = json.loads(made.model_dump_json())
    text = ",\n".join(json.dumps(_rounded(row)) for row in table)
    TARGET.write_text(json.dumps(_rounded(numbers), indent=1)[:-2] + ',\n "table": [\n' + text + "\n]}\n")
    show()


def show() -> None:
    """Print what the committed file says of itself."""
    made = json.loads(TARGET.read_text())
    rows = made["table"]
    for family in sorted({row["name"].rpartition("-")[0] for row in rows}):
        own = [row for row in rows if row["name"].rpartition("-")[0] == family]
        held = sum(row["forecast"]["low"] <= row["gain"] <= row["forecast"]["high"] for row in own)
        shown = "  ".join(f"{row['forecast']['gain']:+.2f}/{row['gain']:+.2f}" for row in own)
        print(f"{family:22} {held} of {len(own)} within   forecast/gain  {shown}")
    for kind in sorted({row["policy"] for row in rows}):
        own = [row for row in rows if row["policy"] == kind]
        rank = spearman([row["forecast"]["gain"] for row in own], [row["gain"] for row in own])
        print(f"policies {kind!r}: {len(own)} runs, rank correlation {'-' if rank is None else f'{rank:.2f}'}")
    width = fmean(row["forecast"]["high"] - row["forecast"]["low"] for row in rows)
    print(
        f"{made['runs']} runs of {made['families']} families, each forecast by the others: rank correlation "
        f"{made['spearman']:.3f}, {100 * made['coverage']:.1f} % within the 90 % interval, its mean width {width:.3f}, "
        f"median error {made['error']:.3f}"
    )


def _fit(
    evidence: Sequence[Evidence], gains: Sequence[float], families: Sequence[str], *, without: set[str]
) -> Calibration:
    """Coefficients by ridge regression; the interval by residuals of families, each left out in its turn."""
    inside = [number for number, family in enumerate(families) if family not in without]
    bare = _ridge([evidence[i] for i in inside], [gains[i] for i in inside])
    residuals = []
    for family in sorted({families[i] for i in inside}):
        others = [i for i in inside if families[i] != family]
        model = _ridge([evidence[i] for i in others], [gains[i] for i in others])
        for i in inside:
            if families[i] == family:
                width = model.width[0] + model.width[1] * evidence[i].spread
                residuals.append((gains[i] - predict(evidence[i], model).gain) / width)
    ends = np.quantile(residuals, [0.05, 0.95], method="weibull")
    return bare.model_copy(update={"residuals": (float(ends[0]), float(ends[1]))})


def _ridge(evidence: Sequence[Evidence], gains: Sequence[float]) -> Calibration:
    moved = float(np.median([one.moved for one in evidence if one.moved is not None] or [0.0]))
    rows = [features(one, moved) for one in evidence]
    names = sorted(rows[0])
    values = np.array([[row[name] for name in names] for row in rows])
    means, scales = values.mean(0), values.std(0) + 1e-9
    x, y = (values - means) / scales, np.array(gains)
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(len(names)), x.T @ (y - y.mean()))
    return Calibration(
        command=COMMAND,
        runs=len(rows),
        families=0,
        spearman=0.0,
        coverage=0.0,
        error=0.0,
        intercept=float(y.mean()),
        coefficients=dict(zip(names, weights.tolist(), strict=True)),
        means=dict(zip(names, means.tolist(), strict=True)),
        scales=dict(zip(names, scales.tolist(), strict=True)),
        residuals=(0.0, 0.0),
        width=WIDTH,
        moved=moved,
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
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
        train(arguments.folder)
    elif arguments.what == "fit":
        fit(arguments.folder)
    else:
        show()


if __name__ == "__main__":
    main()
