"""Predicts a run's gain in mean reward from evidence, with an interval, by the coefficients of calibration.json.

Evidence ─► features ─► gain = Σ coefficient · feature, within a reward's ends
surer     = (reward of likeliest and greedy answers - mean reward) · share
knows     = whether greedy answers are surer where they are right  · share
samples   = the same of sampled rollouts                           · share
share     = (1 - 2^(-nats of a step · steps ÷ HALF_WAY_NATS))      of the way that the steps go
          · (1 - 2^(-steps ÷ HALF_SURE_STEPS))                     of how sure the policy grows
          · exp(-nats of a step · reward ÷ KEPT_NATS)              a long step harms what is right already
          · (1 - 2^(-successes sampled ÷ HALF_FOUND))              what is never sampled is not learned
interval = gain + quantiles of calibration residuals · width      residuals of families that the fit has not seen
width    = least + by_spread · spread              a policy that always earns the same has little to gain

Normalised split-conformal intervals (Lei et al. 2018, arXiv 1604.04173, §5.2), with families in place of single runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

from pydantic import BaseModel, ConfigDict

from lightningrl_training.forecast.evidence import Evidence

__all__ = ["CALIBRATION", "Calibration", "GainForecast", "features", "load_calibration", "predict"]

CALIBRATION: Final = "calibration.json"
LONGEST: Final = 1e3
HALF_WAY_NATS: Final = 0.5
"""Nats by which a run's steps move a rollout where half of what it can gain is gained."""
HALF_SURE_STEPS: Final = 20.0
"""Steps after which a policy has grown half as sure of its likeliest answers as it will."""
KEPT_NATS: Final = 0.3
"""Nats of a step at which a policy that earns everything keeps 1/e of what it would gain."""
HALF_FOUND: Final = 30.0
"""Successes that a run must sample for half of its gain."""


class GainForecast(BaseModel):
    """The gain in mean reward, scaled to [0, 1], that a run's steps are expected to bring."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    gain: float
    low: float
    """Lower end of the 90 % interval."""
    high: float


class Calibration(BaseModel):
    """Coefficients, and the runs that they were fitted to."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    command: str
    """The command that wrote the file."""
    runs: int
    families: int
    spearman: float
    """Rank correlation of forecast and gain, as measured on tasks held out, each family forecast by the others."""
    coverage: float
    """Share of gains, as runs see them, within their 90 % interval, likewise."""
    error: float
    """Median absolute error, likewise."""
    coefficients: Mapping[str, float]
    residuals: tuple[float, float]
    """Quantiles 0.05 and 0.95 of residuals by width."""
    width: tuple[float, float]
    """Least width, and that by spread."""
    moved: float
    """Median nats of a step, for a backend that does not say them."""


@cache
def load_calibration() -> Calibration:
    """Load the committed calibration."""
    return Calibration.model_validate_json((files("lightningrl_training.forecast") / CALIBRATION).read_bytes())


def features(evidence: Evidence, moved: float) -> dict[str, float]:
    """Numbers that a gain is predicted from. `moved`: nats of a step where the evidence does not say."""
    nats = abs(moved if evidence.moved is None else evidence.moved)
    greedy, likeliest = evidence.greedy, evidence.reward if evidence.likeliest is None else evidence.likeliest
    best = likeliest if greedy is None else (likeliest + greedy.reward) / 2.0
    assured = evidence.reward if greedy is None else max(evidence.reward, greedy.assured)
    share = math.exp(-min(nats * evidence.reward / KEPT_NATS, LONGEST)) * math.prod(
        1.0 - 2.0 ** -min(halves, LONGEST)
        for halves in (
            nats * evidence.steps / HALF_WAY_NATS,
            evidence.steps / HALF_SURE_STEPS,
            evidence.steps * evidence.step_rollouts * assured / HALF_FOUND,
        )
    )
    return {
        "surer": (best - evidence.reward) * share,
        "knows": share * (0.0 if greedy is None else greedy.knows),
        "samples": share * evidence.knows,
    }


def predict(evidence: Evidence, calibration: Calibration | None = None) -> GainForecast:
    """Predict the gain over the recipe's steps. `calibration`: another than the committed one."""
    fitted = calibration or load_calibration()
    values = features(evidence, fitted.moved)
    gain = sum(weight * values[name] for name, weight in fitted.coefficients.items())
    least, most = -evidence.reward, 1.0 - evidence.reward
    gain = min(most, max(least, gain))
    width = fitted.width[0] + fitted.width[1] * evidence.spread
    low, high = (min(most, max(least, gain + quantile * width)) for quantile in fitted.residuals)
    return GainForecast(gain=gain, low=low, high=high)
