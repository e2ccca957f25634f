"""`lightningrl export`: a run's newest weights as a transformers folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightningrl.run import Run
from lightningrl.training.run_folder import newest_run

__all__ = ["export_command"]


def export_command(target: Path, *, run: Path | None, runs: Path, policy: str | None = None) -> None:
    step = Run(run or newest_run(runs)).export(target, policy=policy)
    Console().print(f"wrote {target}: weights after step {step}", highlight=False)
