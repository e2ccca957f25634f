"""Tables, picture and numbers of the study, from what its runs left: study.json, study.png and the tables of study.md
in docs/explanation/credit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from agreement import kendall
from learning import PLANS
from methods import METHODS

__all__ = ["Need", "needs", "write_report"]

T_975: Final = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t by degrees of freedom."""
COLOURS: Final = {"identical": "#8a8f98", "turn": "#1f5fa8"}
GAME_COLOURS: Final = {"guess": "#1f5fa8", "sql": "#e08a2c", "door": "#1b7837"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a method needs on a game, at the learning rate of the grid that is best for it."""

    method: str
    rate: float
    runs: int
    reached: int
    rollouts: float
    """Mean; a run that did not reach the target counts with all it had, so that more is meant."""
    margin: float
    """Half of the 95 % interval (Student's t over seeds); NaN for one run."""
    tokens: float
    cpu_s: float

    @property
    def text(self) -> str:
        sign = "" if self.reached == self.runs else "> "
        margin = "" if math.isnan(self.margin) else f" ± {self.margin:.0f}"
        return f"{sign}{self.rollouts:.0f}{margin}"


def needs(runs: Sequence[Mapping[str, Any]], game: str) -> dict[str, Need]:
    """By method, in the order of the methods."""
    best: dict[str, Need] = {}
    for method in METHODS:
        own = [run for run in runs if run["game"] == game and run["method"] == method.name]
        most = max((sum(run["rate"] == rate for run in own) for rate in {run["rate"] for run in own}), default=0)
        for rate in sorted({run["rate"] for run in own}):
            at = [run for run in own if run["rate"] == rate]
            need = _need(method.name, rate, at)
            if len(at) == most and (method.name not in best or need.rollouts < best[method.name].rollouts):
                best[method.name] = need
    return best


def _need(method: str, rate: float, runs: Sequence[Mapping[str, Any]]) -> Need:
    rollouts = np.array([run["rollouts"] for run in runs], np.float64)
    n = len(runs)
    margin = T_975.get(n - 1, 1.96) * float(rollouts.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Need(
        method=method,
        rate=rate,
        runs=n,
        reached=sum(run["reached"] for run in runs),
        rollouts=float(rollouts.mean()),
        margin=margin,
        tokens=float(np.mean([run["tokens"] for run in runs])),
        cpu_s=float(np.mean([run["cpu_s"] for run in runs])),
    )


def write_report(runs: Path, docs: Path) -> None:
    """Raises FileNotFoundError where there is nothing to report."""
    taus, learned = (_read(runs / name) for name in ("tau.jsonl", "learn.jsonl"))
    games = [game for game in PLANS if any(line["game"] == game for line in (*taus, *learned))]
    needed = {game: needs(learned, game) for game in games}
    ranks = {game: _rank_agreement(taus, needed[game], game) for game in games}
    tables = {
        "tau": _tau_table(taus, games),
        "learn": _learn_table(needed, games),
        "ranks": _rank_table(ranks),
        "control": _control_table(learned, games),
    }
    docs.mkdir(parents=True, exist_ok=True)
    numbers = {
        "tau": taus,
        "needs": {game: [asdict(need) for need in found.values()] for game, found in needed.items()},
        "ranks": ranks,
        "runs": [{key: value for key, value in run.items() if key != "curve"} for run in learned],
    }
    (docs / "study.json").write_text(re.sub(r"\bNaN\b", "null", json.dumps(numbers, indent=1)) + "\n", encoding="utf-8")
    page = docs / "study.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for name, table in tables.items():
        print(f"\n{table}")
        pattern = rf"(<!-- {name}: .*?-->\n).*?(\n<!-- end -->)"
        replacement = rf"\g<1>\n{table.replace(chr(92), chr(92) * 2)}\n\g<2>"
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    if text:
        page.write_text(text, encoding="utf-8")
    draw(taus, needed, docs / "study.png")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; a row that has nothing but its name is left out."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (header, *(row for row in rows if any(row[1:]))))
    return "\n".join([head, "|---" * len(header) + "|", *lines])


def _tau_table(lines: Sequence[Mapping[str, Any]], games: Sequence[str]) -> str:
    by_column = {(line["game"], line["policy"], line["method"]): line for line in lines}
    columns = [(game, policy) for game in games for policy in dict.fromkeys(line["policy"] for line in lines)]
    rows = [
        [method.name, *(_tau_cell(by_column.get((*column, method.name))) for column in columns)] for method in METHODS
    ]
    return _table(["method", *(f"{game}, {policy}" for game, policy in columns)], rows)


def _tau_cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return ""
    right = "–" if math.isnan(line["right"]) else f"{line['right']:.0%}"
    return f"{line['tau']:.2f}, {right}"


def _best_identical(needed: Mapping[str, Need]) -> Need | None:
    """Of those with the most runs."""
    names = {method.name for method in METHODS if method.family == "identical"}
    identical = [need for need in needed.values() if need.method in names]
    most = max((need.runs for need in identical), default=0)
    return min((need for need in identical if need.runs == most), key=lambda need: need.rollouts, default=None)


def _learn_table(needed: Mapping[str, Mapping[str, Need]], games: Sequence[str]) -> str:
    best = {game: _best_identical(needed[game]) for game in games}
    rows = [
        [method.name, *(_learn_cell(needed[game].get(method.name), best[game]) for game in games)] for method in METHODS
    ]
    return _table(["method", *games], rows)


def _learn_cell(need: Need | None, best: Need | None) -> str:
    if need is None or best is None:
        return ""
    share = f"{need.rollouts / best.rollouts:.2f}"
    return f"{need.text}, {f'**{share}**' if float(share) <= 0.5 else share}"


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
    rollouts = [-needed[name].rollouts for name in names]
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


def _rank_table(ranks: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(dict.fromkeys(key for ranking in ranks.values() for key in ranking))
    return _table(
        ["game", *columns],
        [[game, *(_rank_cell(key, ranking) for key in columns)] for game, ranking in ranks.items()],
    )


def _rank_cell(key: str, ranking: Mapping[str, float]) -> str:
    return "" if key not in ranking else f"{ranking[key]:.0f}" if key == "methods" else f"{ranking[key]:.2f}"


def _control_table(learned: Sequence[Mapping[str, Any]], games: Sequence[str]) -> str:
    runs = [run for run in learned if run["rate"] == 0.0 and run["game"] in games]
    sampled = [[point[2] for point in run["curve"]] for run in runs]
    rows = [
        [run["game"], f"{curve[0]:.4f}", f"{min(curve):.4f}", f"{max(curve):.4f}", str(run["steps"])]
        for run, curve in zip(runs, sampled, strict=True)
    ]
    return _table(["game", "success at the start", "least", "most", "steps"], rows)


def draw(taus: Sequence[Mapping[str, Any]], needed: Mapping[str, Mapping[str, Need]], file: Path) -> None:
    """Rollouts to the target by method, a panel for each game; then rollouts over τ."""
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
        for name, need in needed[game].items():
            y, colour = names.index(name), COLOURS[families[name]]
            margin = 0.0 if math.isnan(need.margin) else need.margin
            all_reached = need.reached == need.runs
            axes.errorbar(
                need.rollouts, y, xerr=margin, fmt="o" if all_reached else ">", color=colour, capsize=2, markersize=6
            )
        best = _best_identical(needed[game])
        if best is not None:
            axes.axvline(best.rollouts / 2, color="#b2182b", linewidth=1.0, linestyle="--")
        axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("rollouts to the target (› = more)")
        axes.set_title(
            f"{game}: {PLANS[game].target:.0%} of held-out cases", loc="left", fontsize=11, fontweight="bold"
        )
    axes = panels[-1]
    for game in games:
        points = []
        for name, need in needed[game].items():
            own = [line["tau"] for line in taus if line["game"] == game and line["method"] == name]
            if own:
                points.append((float(np.mean(own)), need.rollouts))
        if points:
            axes.scatter(*zip(*points, strict=True), color=GAME_COLOURS[game], label=game, s=26)
    axes.set_yscale("log")
    axes.set_xlabel("Kendall τ with the true advantage")
    axes.set_ylabel("rollouts to the target")
    axes.set_title("Right, and quick?", loc="left", fontsize=11, fontweight="bold")
    axes.legend(frameon=False, fontsize=9)
    for axes in panels:
        axes.grid(color="#e3e5e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png")


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
