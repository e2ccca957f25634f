"""Train many small policies and fit the forecast of `lightningrl forecast` to what became of them.

    python scripts/calibrate_forecast.py train FOLDER     a JSON line per run in FOLDER/runs.jsonl; goes on where it was
    python scripts/calibrate_forecast.py fit FOLDER       writes packages/training/…/forecast/calibration.json
    python scripts/calibrate_forecast.py show             what the committed file says of itself, family by family

The runs are listed in `forecast_runs.py`, beforehand; none is left out but one that raised. Coefficients are fitted to
gains on tasks held out, of small policies; intervals to gains as a run sees them, last quarter less first step.
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
import torch
from forecast_runs import FRESH, ROOT, train
from torch.nn.functional import huber_loss

from lightningrl_training.forecast.evidence import Evidence
from lightningrl_training.forecast.history import spearman
from lightningrl_training.forecast.prediction import CALIBRATION, Calibration, features, most_gain, predict
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


def fit(folder: Path) -> None:
    """Fit all runs, and say what the fit is worth on families that it has not seen."""
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row["evidence"] and row["outcome"]]
    evidence = [Evidence.model_validate(row["evidence"]) for row in rows]
    seen = [Outcome.model_validate(row["outcome"]).gain for row in rows]
    gains = [float(row.get("gain", gain)) for row, gain in zip(rows, seen, strict=True)]
    families = [row["family"] for row in rows]
    forecasts = [
        predict(one, _fit(evidence, gains, seen, families, without={family}))
        for one, family in zip(evidence, families, strict=True)
    ]
    whole = _fit(evidence, gains, seen, families, without=set())
    told = {
        "spearman": spearman([forecast.gain for forecast in forecasts], gains) or 0.0,
        "coverage": fmean(f.low <= gain <= f.high for f, gain in zip(forecasts, seen, strict=True)),
        "error": float(np.median([abs(f.gain - gain) for f, gain in zip(forecasts, gains, strict=True)])),
    }
    made = whole.model_copy(update={"runs": len(rows), "families": len(set(families)), **told})
    table = [
        {
            "name": row["name"],
            "policy": row["policy"],
            "draw": row["draw"],
            **{key.rpartition(".")[2]: value for key, value in row["settings"].items()},
            "gain": gain,
            "seen": seen_gain,
            "forecast": forecast.model_dump(),
        }
        for row, gain, seen_gain, forecast in zip(rows, gains, seen, forecasts, strict=True)
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
        shown = "  ".join(f"{row['forecast']['gain']:+.2f}/{row['gain']:+.2f}" for row in own)
        print(f"{family:22} {_within(own, 'seen')}   forecast/gain  {shown}")
    steady = [row for row in rows if row["gain"] >= APART]
    print(f"{made['runs']} runs of {made['families']} families, each forecast by the others")
    print(f"rank correlation with the gain on tasks held out: {_rank(rows, 'gain')}")
    print(f"  without the {len(rows) - len(steady)} runs that fell apart: {_rank(steady, 'gain')}")
    print(f"  with the gain as the run sees it, a quarter of its steps less the first: {_rank(rows, 'seen')}")
    fresh = [row for row in rows if row["draw"] in FRESH]
    print(f"  of {len(fresh)} runs of draws {FRESH}: {_rank(fresh, 'gain')}")
    kinds = {"SmolLM2": ("smollm2",), "policies with a habit": ("form", "habit"), "hidden knowledge": ("hidden",)}
    for kind, policies in kinds.items():
        own, others = ([row for row in rows if (row["policy"] in policies) == is_in] for is_in in (True, False))
        print(f"  of {len(own)} runs of {kind}: {_rank(own, 'gain')}; of the others: {_rank(others, 'gain')}")
    for rate in sorted({row["learning_rate"] for row in rows}):
        own = [row for row in rows if row["learning_rate"] == rate]
        apart = sum(row["gain"] < APART for row in own)
        print(f"  of {len(own)} runs at learning rate {rate:g}, {apart} of which fell apart: {_rank(own, 'gain')}")
    print(
        f"within the 90 % interval: as runs see them {_within(rows, 'seen')}; on tasks held out {_within(rows, 'gain')}"
    )
    width = fmean(row["forecast"]["high"] - row["forecast"]["low"] for row in rows)
    print(f"mean width of an interval {width:.3f}, median error {made['error']:.3f}")


def _within(rows: Sequence[dict[str, Any]], which: str) -> str:
    held = sum(row["forecast"]["low"] <= row[which] <= row["forecast"]["high"] for row in rows)
    return f"{held} of {len(rows)} ({100 * held / len(rows):.1f} %)"


def _rank(rows: Sequence[dict[str, Any]], which: str) -> str:
    rank = spearman([row["forecast"]["gain"] for row in rows], [row[which] for row in rows])
    return "-" if rank is None else f"{rank:.2f}"


def _fit(
    evidence: Sequence[Evidence],
    gains: Sequence[float],
    seen: Sequence[float],
    families: Sequence[str],
    *,
    without: set[str],
) -> Calibration:
    """Coefficients by `_regress`; the interval by residuals of families, each left out in its turn."""
    inside = [number for number, family in enumerate(families) if family not in without]
    bare = _regress([evidence[i] for i in inside], [gains[i] for i in inside])
    below, above = [], []
    for family in sorted({families[i] for i in inside}):
        others = [i for i in inside if families[i] != family]
        model = _regress([evidence[i] for i in others], [gains[i] for i in others])
        for i in inside:
            if families[i] == family:
                told = predict(evidence[i], model).gain
                down, up = model.widths(evidence[i], told)
                below.append((seen[i] - told) / down)
                above.append((seen[i] - told) / up)
    ends = (np.quantile(below, 0.05, method="weibull"), np.quantile(above, 0.95, method="weibull"))
    return bare.model_copy(update={"residuals": (float(ends[0]), float(ends[1]))})


def _regress(evidence: Sequence[Evidence], gains: Sequence[float]) -> Calibration:
    """Logistic regression of what is left to gain, by Huber's loss and a ridge."""
    moved = float(np.median([one.moved for one in evidence if one.moved is not None] or [0.0]))
    rows = [features(one) for one in evidence]
    names = sorted(rows[0])
    values = torch.tensor([[row[name] for name in names] for row in rows], dtype=torch.float64)
    most = torch.tensor([most_gain(one, moved) for one in evidence], dtype=torch.float64)
    means, scales = values.mean(0), values.std(0) + 1e-6
    x, y = (values - means) / scales, torch.tensor(gains, dtype=torch.float64)
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
        train(arguments.folder)
    elif arguments.what == "fit":
        fit(arguments.folder)
    else:
        show()


if __name__ == "__main__":
    main()
