"""Predicts a run's gain in mean reward from evidence, with an interval, by the coefficients of calibration.json.

Evidence ─► features ─► gain = (1 - reward) · way · logistic(bias + Σ coefficient · feature)
way      = 1 - 2^(-nats of a step · steps ÷ HALF_WAY_NATS)     a policy that does not move gains nothing
steps    = log steps
assured  = log(RARE + what greedy answers alone earn when the policy samples)
surer    = reward of likeliest and greedy answers above the mean reward, at least 0
hidden   = mean reward above that of likeliest and greedy answers, at least 0: what a policy knows and seldom says
knows    = whether greedy answers are surer where they are right
raised   = nats by which a step makes likelier what earned, within MOST_RAISED
rehearsed = greedy and sampled reward above the mean reward, the best before and after a rehearsal; its own coefficients
interval = gain + quantiles of calibration residuals · width     residuals of families that the fit has not seen
width    = least + by_spread · spread downwards, least + gain upwards

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

__all__ = ["CALIBRATION", "Calibration", "GainForecast", "features", "load_calibration", "most_gain", "predict"]

CALIBRATION: Final = "calibration.json"
HALF_WAY_NATS: Final = 0.2
"""Nats by which a run's steps move a rollout where half of what it can gain is gained."""
RARE: Final = 0.03
"""Reward of greedy answers that is no more than noise."""
MOST_RAISED: Final = (-1.0, 2.0)
"""Nats of a step beyond which runs were too few to tell a difference."""
LONGEST: Final = 1e3


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
    bias: float
    coefficients: Mapping[str, float]
    residuals: tuple[float, float]
    """Quantile 0.05 of residuals by the width downwards, and 0.95 by that upwards."""
    width: tuple[float, float]
    """Least width, and that by spread."""
    moved: float
    """Median nats of a step, for a backend that does not say them."""
    rehearsed: Calibration | None = None
    """The same of forecasts with a rehearsal."""

    def of(self, evidence: Evidence) -> Calibration:
        """The calibration for forecasts from such evidence."""
        return self if evidence.rehearsed is None or self.rehearsed is None else self.rehearsed

    def widths(self, evidence: Evidence, gain: float) -> tuple[float, float]:
        """Units of the residuals below and above a forecast."""
        least, by_spread = self.width
        return least + by_spread * evidence.spread, least + gain


@cache
def load_calibration() -> Calibration:
    """Load the committed calibration."""
    return Calibration.model_validate_json((files("lightningrl_training.forecast") / CALIBRATION).read_bytes())


def features(evidence: Evidence) -> dict[str, float]:
    """Numbers that a gain is predicted from."""
    greedy, likeliest = evidence.greedy, evidence.reward if evidence.likeliest is None else evidence.likeliest
    sure = likeliest if greedy is None else (likeliest + greedy.reward) / 2.0
    low, high = MOST_RAISED
    return {
        "steps": math.log(evidence.steps),
        "assured": math.log(RARE + max(0.0, evidence.assured)),
        "surer": max(0.0, sure - evidence.reward),
        "hidden": max(0.0, evidence.reward - sure),
        "knows": evidence.knows,
        "raised": min(high, max(low, evidence.raised)),
        "rehearsed": _rehearsed(evidence),
    }


def _rehearsed(evidence: Evidence) -> float:
    shown = evidence.rehearsed
    if shown is None:
        return 0.0
    greedy = max(shown.greedy, evidence.greedy.reward if evidence.greedy else 0.0)
    return greedy + max(shown.sampled, evidence.reward) - 2.0 * evidence.reward


def most_gain(evidence: Evidence, moved: float) -> float:
    """Reward left to gain, times the share of the way that the steps go. `moved`: nats of a step where the evidence
    does not say."""
    nats = abs(moved if evidence.moved is None else evidence.moved) * evidence.steps
    return (1.0 - evidence.reward) * (1.0 - math.pow(2.0, -min(nats / HALF_WAY_NATS, LONGEST)))


def predict(evidence: Evidence, calibration: Calibration | None = None) -> GainForecast:
    """Predict the gain over the recipe's steps. `calibration`: another than the committed one."""
    fitted = (calibration or load_calibration()).of(evidence)
    values = features(evidence)
    log_odds = fitted.bias + sum(weight * values[name] for name, weight in fitted.coefficients.items())
    gain = most_gain(evidence, fitted.moved) / (1.0 + math.exp(-log_odds))
    least, most = -evidence.reward, 1.0 - evidence.reward
    low, high = (
        min(most, max(least, gain + quantile * width))
        for quantile, width in zip(fitted.residuals, fitted.widths(evidence, gain), strict=True)
    )
    return GainForecast(gain=gain, low=low, high=high)
