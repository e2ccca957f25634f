"""Tables, picture and numbers of the study, from what its runs left: study.json, study.png and the tables of study.md
in docs/explanation/credit."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agreement import kendall
from learning import PLANS
from measuring import fill_page
from methods import BROADCAST, METHODS

from lightningrl.figures import holm, rank_sum_p

__all__ = ["Need", "Question", "needs", "questions", "write_report"]

IDENTICAL: Final = tuple(method.name for method in METHODS if method.family == "identical")
"""Methods that all others are held against, their runs taken together."""
BY_CALL: Final = ("air: tool_status", "air: tool_status, γ = 0")
"""Methods that are rewarded as `BROADCAST` is, and credit by call."""
SHOWN: Final = 0.05
DRAWS: Final = 10_000
NEVER: Final = 1e9
"""Rollouts of what did not get there, in a ranking."""
COLOURS: Final = {"identical": "#8a8f98", "denser": "#e08a2c", "turn": "#1f5fa8"}
GAME_COLOURS: Final = {"guess": "#1f5fa8", "sql": "#e08a2c", "door": "#1b7837"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Rollouts that a method needs on a game."""

    method: str
    runs: int
    reached: int
    rollouts: float
    """Median; infinite where half of the runs did not reach the target."""
    tokens: float
    """Mean, of runs that did not get there too."""
    cpu_s: float
    p: float | None
    """P-value of the exact rank test against identical credit, Holm over all methods and games. None = it is one of
    those."""
    is_quicker: bool
    """True if a run of it is likelier to be earlier than one of identical credit than later."""

    @property
    def text(self) -> str:
        rollouts = f"{self.rollouts:.0f}" if math.isfinite(self.rollouts) else "none"
        said = f"{rollouts}, {self.reached}/{self.runs}"
        if self.p is None:
            return said
        if self.p >= SHOWN:
            return f"{said}, {self.p:.2f}"
        return f"**{said}, {format_p(self.p)} {'quicker' if self.is_quicker else 'slower'}**"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Two methods that differ in one thing, on one game."""

    game: str
    method: str
    """Credited by call, and held against `BROADCAST`."""
    median: float
    median_against: float
    ratio: float
    """Ratio of mean rollouts; a run that never arrived counts with all it had."""
    low: float
    high: float
    """95 % interval of the ratio: runs of each method drawn again."""
    p: float
    """Exact rank test, Holm over all questions."""


def needs(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Need]]:
    """Game -> method -> what it needs. A run that did not reach the target is later than all that did."""
    arrivals = {
        (game, method.name): found
        for game in PLANS
        for method in METHODS
        if (found := _arrivals(runs, game, method.name))
    }
    identical = {game: [time for name in IDENTICAL for time in arrivals.get((game, name), [])] for game, _ in arrivals}
    p_values = holm(
        {
            (game, name): rank_sum_p(found, identical[game])
            for (game, name), found in arrivals.items()
            if name not in IDENTICAL and identical[game]
        }
    )
    needed: dict[str, dict[str, Need]] = {}
    for (game, name), found in arrivals.items():
        own = [run for run in runs if (run["game"], run["method"]) == (game, name)]
        needed.setdefault(game, {})[name] = Need(
            method=name,
            runs=len(found),
            reached=sum(map(math.isfinite, found)),
            rollouts=_median(found),
            tokens=float(np.mean([run["tokens"] for run in own])),
            cpu_s=float(np.mean([run["cpu_s"] for run in own])),
            p=p_values.get((game, name)),
            is_quicker=_rank(found, identical[game]) < 0.5,
        )
    return needed


def questions(runs: Sequence[Mapping[str, Any]]) -> list[Question]:
    """Does credit by call pay, where both arms are rewarded alike?"""
    pairs = {
        (game, method): (first, second)
        for game in PLANS
        for method in BY_CALL
        if (first := _arrivals(runs, game, method)) and (second := _arrivals(runs, game, BROADCAST))
    }
    p_values = holm({key: rank_sum_p(*pair) for key, pair in pairs.items()})
    return [
        Question(
            game=game,
            method=method,
            median=_median(first),
            median_against=_median(second),
            **_ratio(first, second, PLANS[game].rollouts),
            p=p_values[game, method],
        )
        for (game, method), (first, second) in pairs.items()
    ]


def _arrivals(runs: Sequence[Mapping[str, Any]], game: str, method: str) -> list[float]:
    """Rollouts to the target; infinite for a run that did not get there."""
    own = [run for run in runs if (run["game"], run["method"]) == (game, method)]
    return [float(run["rollouts"]) if run["reached"] else math.inf for run in own]


def _ratio(first: Sequence[float], second: Sequence[float], most: int) -> dict[str, float]:
    chance = np.random.default_rng(0)
    capped = [np.minimum(times, most) for times in (first, second)]
    drawn = [chance.choice(times, (DRAWS, len(times))).mean(axis=1) for times in capped]
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    return {"ratio": float(capped[0].mean() / capped[1].mean()), "low": float(low), "high": float(high)}


def _median(times: Sequence[float]) -> float:
    """The later of the middle two, as infinity has no half."""
    return sorted(times)[len(times) // 2]


def _rank(times: Sequence[float], others: Sequence[float]) -> float:
    """The chance that one of `others` is earlier than one of `times`; a half for equal ones."""
    pairs = [(own > other) + 0.5 * (own == other) for own in times for other in others]
    return float(np.mean(pairs)) if pairs else 0.5


def write_report(runs: Path, docs: Path) -> None:
    """Raises FileNotFoundError where there is nothing to report."""
    taus, learned = (_read(runs / name) for name in ("tau.jsonl", "learn.jsonl"))
    games = [game for game in PLANS if any(line["game"] == game for line in (*taus, *learned))]
    trained = [run for run in learned if run["rate"] > 0.0]
    needed, asked = needs(trained), questions(trained)
    ranks = {game: _rank_agreement(taus, needed.get(game, {}), game) for game in games}
    tables = {
        "tau": _tau_table(taus, games),
        "learn": _learn_table(needed),
        "questions": _question_table(asked),
        "control": _control_table(learned, games),
    }
    docs.mkdir(parents=True, exist_ok=True)
    numbers = {
        "tau": taus,
        "needs": {game: [asdict(need) for need in found.values()] for game, found in needed.items()},
        "questions": [asdict(question) for question in asked],
        "ranks": ranks,
        "runs": [{key: value for key, value in run.items() if key != "curve"} for run in learned],
    }
    (docs / "study.json").write_text(
        re.sub(r"\b(NaN|Infinity)\b", "null", json.dumps(numbers, indent=1)) + "\n", encoding="utf-8"
    )
    fill_page(docs / "study.md", tables)
    draw(taus, trained, needed, docs / "study.png")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; a row that has nothing but its name is left out."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (header, *(row for row in rows if any(row[1:]))))
    return "\n".join([head, "|---" * len(header) + "|", *lines])


def _tau_table(lines: Sequence[Mapping[str, Any]], games: Sequence[str]) -> str:
    by_column = {(line["game"], line["policy"], line["method"]): line for line in lines}
    columns = [(game, "half-trained") for game in games]  # of random ones study.json knows
    rows = [
        [method.name, *(_tau_cell(by_column.get((*column, method.name))) for column in columns)] for method in METHODS
    ]
    return _table(["method", *games], rows)


def _tau_cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return ""
    right = "–" if math.isnan(line["right"]) else f"{line['right']:.0%}"
    return f"{line['tau']:.2f}, {right}"


def _learn_table(needed: Mapping[str, Mapping[str, Need]]) -> str:
    rows = [
        [method.name, *(found[method.name].text if method.name in found else "" for found in needed.values())]
        for method in METHODS
    ]
    return _table(["method", *needed], rows)


def _question_table(asked: Sequence[Question]) -> str:
    rows = [
        [
            one.game,
            one.method,
            *(_rollouts(median) for median in (one.median, one.median_against)),
            f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]",
            format_p(one.p),
        ]
        for one in asked
    ]
    return _table(["game", "by call", "rollouts", "the same pay, broadcast", "ratio [95 %]", "p"], rows)


def _rollouts(median: float) -> str:
    return f"{median:.0f}" if math.isfinite(median) else "none"


def format_p(p: float) -> str:
    return f"{p:.2f}" if p >= 0.1 else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _rank_agreement(taus: Sequence[Mapping[str, Any]], needed: Mapping[str, Need], game: str) -> dict[str, float]:
    """Kendall's τ of two rankings of the methods: by agreement with the truth, and by rollouts; by policy, and of the
    mean of both."""
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for line in taus:
        if line["game"] == game and line["method"] in needed:
            by_method.setdefault(line["method"], []).append(line)
    names = list(by_method)
    if len(names) < 3:
        return {}
    rollouts = [-min(needed[name].rollouts, NEVER) for name in names]
    result = {"methods": float(len(names))}
    for policy in dict.fromkeys(line["policy"] for line in taus):
        chosen = [
            next((line["tau"] for line in by_method[name] if line["policy"] == policy), math.nan) for name in names
        ]
        if not any(map(math.isnan, chosen)):
            result[policy] = kendall(chosen, rollouts)
    result["mean of both"] = kendall(
        [float(np.mean([line["tau"] for line in by_method[name]])) for name in names], rollouts
    )
    return result


def _control_table(learned: Sequence[Mapping[str, Any]], games: Sequence[str]) -> str:
    runs = [run for run in learned if run["rate"] == 0.0 and run["game"] in games]
    sampled = [[point[2] for point in run["curve"]] for run in runs]
    rows = [
        [run["game"], f"{curve[0]:.4f}", f"{min(curve):.4f}", f"{max(curve):.4f}", str(run["steps"])]
        for run, curve in zip(runs, sampled, strict=True)
    ]
    return _table(["game", "success at the start", "least", "most", "steps"], rows)


def draw(
    taus: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    needed: Mapping[str, Mapping[str, Need]],
    file: Path,
) -> None:
    """Rollouts to the target by method, a panel for each game: a dot for each run, a line at the median; then medians
    over τ."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    games = [game for game in needed if needed[game]]
    if not games:
        return
    figure = Figure(figsize=(4.2 * (len(games) + 1), 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(games) + 1)
    names = [method.name for method in METHODS if any(method.name in needed[game] for game in games)]
    families = {method.name: method.family for method in METHODS}
    for number, game in enumerate(games):
        axes = panels[number]
        most = PLANS[game].rollouts
        for name, need in needed[game].items():
            y, colour = names.index(name), COLOURS[families[name]]
            times = [time if math.isfinite(time) else 1.1 * most for time in _arrivals(runs, game, name)]
            axes.scatter(times, [y] * len(times), color=colour, alpha=0.45, s=22, linewidths=0)
            if math.isfinite(need.rollouts):
                axes.plot([need.rollouts] * 2, [y - 0.35, y + 0.35], color=colour, linewidth=2.2)
        axes.axvline(1.05 * most, color="#b2182b", linewidth=1.0, linestyle="--")
        axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("rollouts to the target (right of the line: never)")
        axes.set_title(
            f"{game}: {PLANS[game].target:.0%} of held-out cases", loc="left", fontsize=11, fontweight="bold"
        )
    axes = panels[-1]
    for game in games:
        points = []
        for name, need in needed[game].items():
            own = [line["tau"] for line in taus if line["game"] == game and line["method"] == name]
            if own and math.isfinite(need.rollouts):
                points.append((float(np.mean(own)), need.rollouts))
        if points:
            axes.scatter(*zip(*points, strict=True), color=GAME_COLOURS[game], label=game, s=26)
    axes.set_yscale("log")
    axes.set_xlabel("Kendall τ with the true advantage")
    axes.set_ylabel("rollouts to the target, median")
    axes.set_title("Right, and quick?", loc="left", fontsize=11, fontweight="bold")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    for axes in panels:
        axes.grid(color="#e3e5e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png")


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
