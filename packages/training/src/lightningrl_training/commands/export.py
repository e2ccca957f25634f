"""`lightningrl export`: a run's best or newest weights as a transformers folder, a GGUF file or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl_training.checkpoints import best_checkpoint
from lightningrl_training.commands.printing import Page
from lightningrl_training.export_check import readers_of
from lightningrl_training.run import Run
from lightningrl_viewer.reading.origin import newest_run

__all__ = ["export_command", "parse_step"]


def export_command(target: Path, *, run: Path | None, runs: Path, step: str | None, **form: Any) -> None:
    """`form`: policy and form of the weights, as `Run.export` takes them."""
    source = Run(run or newest_run(runs))
    written = source.export(target, step=parse_step(step), **form)
    best = best_checkpoint(source.folder)
    which = (
        f", the best by validation ({best.state.score:.3f})" if best is not None and best.state.step == written else ""
    )
    newer = f"; the newest are of step {source.steps}: --step newest" if source.steps > written and step is None else ""
    sent = f", and sent it to {form['push_to_hub']} of the hub" if form.get("push_to_hub") else ""
    checked = ""
    if form.get("check"):
        readers = " and ".join(readers_of(target, "its base" if form.get("adapter") else None))
        checked = f"; the validation calls, asked again of {readers}, are answered as the run did"
    Page().print(f"wrote {target}: weights after step {written}{which}{sent}{checked}{newer}")


def parse_step(text: str | None) -> str | int | None:
    """`best`, `newest`, or a step."""
    if text is None or text in ("best", "newest"):
        return text
    if not text.isdecimal():
        raise ConfigError(f"--step {text!r} is neither 'best', 'newest' nor a step; write for example --step 40")
    return int(text)
