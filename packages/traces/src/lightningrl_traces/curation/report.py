"""Report of a curation, what was kept and what was left out and why: as report.json, a table, a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from lightningrl.console import escape
from lightningrl_traces.curation.chat_calls import LeftOut, Likeness
from lightningrl_traces.curation.files import KINDS
from lightningrl_traces.curation.rules import Rules

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Counts of a curation."""

    runs: Sequence[str]
    rules: Rules
    rollouts_read: int
    calls_read: int
    rollouts_left_out: Mapping[LeftOut, int]
    calls_left_out: Mapping[LeftOut, int]
    rows_left_out: Mapping[str, Mapping[LeftOut, int]]
    """Candidates by kind of row; of dpo, prompts."""
    rows: Mapping[tuple[str, str], int]
    """Rows written, by side and kind."""
    likeness: Mapping[Likeness, int]
    """Rows of sft.jsonl by what their prompts are to the recorded tokens."""
    reward_failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rollouts by the reason why a reward of `--reward` failed on them; they have none."""

    states: int = 0
    """Tasks of traces whose input stays a state of messages, which asks no single question."""

    def total(self, kind: str) -> int:
        """Return the rows of a kind on both sides."""
        return sum(count for (_, own), count in self.rows.items() if own == kind)

    def as_json(self) -> dict[str, Any]:
        """Return the report as report.json has it."""
        sides = sorted({side for side, _ in self.rows})
        rules = {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(self.rules).items()
        }
        return {
            "runs": list(self.runs),
            "rules": rules,
            "rollouts": {"read": self.rollouts_read, "left_out": _words(self.rollouts_left_out)},
            "calls": {"read": self.calls_read, "left_out": _words(self.calls_left_out)},
            "rows": {
                kind: {
                    "kept": self.total(kind),
                    **{side: self.rows.get((side, kind), 0) for side in sides if side},
                    "left_out": _words(self.rows_left_out.get(kind, {})),
                }
                for kind in KINDS
            },
            **({"reward_failures": dict(self.reward_failures)} if self.reward_failures else {}),
            **({"states": self.states} if self.states else {}),
            "prompts": {likeness.value: count for likeness, count in self.likeness.items()},
        }

    def as_table(self) -> Table:
        """Draw the report for a terminal."""
        table = Table("", "", "count", box=None, pad_edge=False, show_header=False)
        table.columns[2].justify = "right"
        table.add_row("rollouts", "read", str(self.rollouts_read))
        _add_reasons(table, self.rollouts_left_out)
        for reason, count in self.reward_failures.items():
            table.add_row("", f"no reward: {escape(reason)}", str(count), style="yellow")
        table.add_row("calls", "read", str(self.calls_read))
        _add_reasons(table, self.calls_left_out)
        for kind in KINDS:
            sides = [f"{count} {side}" for (side, own), count in self.rows.items() if own == kind and side]
            where = f"kept: {', '.join(sides)}" if sides else "kept"
            table.add_row(f"{kind}.jsonl", where, str(self.total(kind)), style="bold")
            _add_reasons(table, self.rows_left_out.get(kind, {}))
        return table

    def explain(self) -> str:
        """Say in a sentence what was left out, the commonest reason first."""
        counts: Counter[LeftOut] = Counter()
        for left_out in (self.rollouts_left_out, self.calls_left_out, self.rows_left_out.get("sft", {})):
            counts.update(left_out)
        reasons = "; ".join(f"{count} × {reason.value}" for reason, count in counts.most_common(4))
        return f"of {self.rollouts_read} rollouts with {self.calls_read} calls were left out: {reasons or 'none'}"


def _words(reasons: Mapping[LeftOut, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])}


def _add_reasons(table: Table, reasons: Mapping[LeftOut, int]) -> None:
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        table.add_row("", f"left out: {reason.value}", str(count), style="dim")
