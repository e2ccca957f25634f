"""The curated folder: files of rows and a report of what was kept, what was left out and why, for their owner alone,
and there only when all are whole.

FOLDER/{sft,dpo,kto,tasks}.jsonl, or below train/ and validation/, and report.json
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from rich.table import Table

from lightningrl.console import escape
from lightningrl.errors import RunFolderError
from lightningrl_traces.curation.rules import LeftOut, Likeness, Rules

__all__ = ["Report", "RowFiles", "check_target"]

_KINDS: Final = ("sft", "dpo", "kto", "tasks")


def check_target(folder: Path) -> None:
    """Raise RunFolderError where a folder cannot become a curated one: it has files already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{str(folder)!r} is no empty folder; name another for the curated rows: --into")


@dataclass(kw_only=True, slots=True)
class Report:
    """Counts of a curation, made while it goes on."""

    runs: Sequence[str]
    rules: Rules
    rollouts_read: int = 0
    calls_read: int = 0
    rollouts_left_out: Counter[LeftOut] = field(default_factory=Counter[LeftOut])
    calls_left_out: Counter[LeftOut] = field(default_factory=Counter[LeftOut])
    rows_left_out: dict[str, Counter[LeftOut]] = field(default_factory=lambda: {kind: Counter() for kind in _KINDS})
    """Candidates by kind of row; of dpo, prompts."""
    rows: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Rows written, by side (`train`, `validation`, or empty) and kind."""
    likeness: Counter[Likeness] = field(default_factory=Counter[Likeness])
    """Rows of sft.jsonl by what their prompts are to the recorded tokens."""
    reward_failures: Counter[str] = field(default_factory=Counter[str])
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
                    **{side: self.rows[side, kind] for side in sides if side},
                    "left_out": _words(self.rows_left_out[kind]),
                }
                for kind in _KINDS
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
        for kind in _KINDS:
            sides = [f"{count} {side}" for (side, own), count in self.rows.items() if own == kind and side]
            where = f"kept: {', '.join(sides)}" if sides else "kept"
            table.add_row(f"{kind}.jsonl", where, str(self.total(kind)), style="bold")
            _add_reasons(table, self.rows_left_out[kind])
        return table

    def explain(self) -> str:
        """Say in a sentence what was left out, the commonest reason first."""
        counts: Counter[LeftOut] = Counter()
        for left_out in (self.rollouts_left_out, self.calls_left_out, self.rows_left_out["sft"]):
            counts.update(left_out)
        reasons = "; ".join(f"{count} × {reason.value}" for reason, count in counts.most_common(4))
        return f"of {self.rollouts_read} rollouts with {self.calls_read} calls were left out: {reasons or 'none'}"


class RowFiles:
    """Rows being written beside the folder that they will be in; leaving without `publish` leaves nothing behind."""

    def __init__(self, folder: Path, report: Report) -> None:
        check_target(folder)
        self._report = report
        self._folder = folder.absolute()
        self._sides = ("train", "validation") if report.rules.validation else ("",)
        self._files: dict[tuple[str, str], TextIO] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._draft = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}.", dir=self._folder.parent))
        except OSError as error:
            raise RunFolderError(
                f"no folder can be written at {str(self._folder)!r}: {error.strerror}; name another: --into"
            ) from error
        for side in self._sides:
            (self._draft / side).mkdir(exist_ok=True)
            for kind in _KINDS:
                self._files[side, kind] = self._open.enter_context(_create(self._draft / side / f"{kind}.jsonl"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def write(self, side: str, kind: str, row: dict[str, Any]) -> None:
        """Add a row."""
        self._files[side, kind].write(json.dumps(row, ensure_ascii=False) + "\n")
        self._report.rows[side, kind] += 1

    def publish(self) -> None:
        """Write the report and let the folder appear."""
        self._open.close()
        with _create(self._draft / "report.json") as file:
            file.write(json.dumps(self._report.as_json(), indent=1, ensure_ascii=False) + "\n")
        check_target(self._folder)
        if self._folder.exists():
            self._folder.rmdir()
        self._draft.rename(self._folder)


def _create(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")


def _words(reasons: Mapping[LeftOut, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])}


def _add_reasons(table: Table, reasons: Mapping[LeftOut, int]) -> None:
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        table.add_row("", f"left out: {reason.value}", str(count), style="dim")
