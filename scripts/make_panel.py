"""Writes docs/panel.svg: what `lightningrl train first` shows on a terminal, from a run of it that is made for the
picture.

python scripts/make_panel.py
"""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.checks import build_checked
from lightningrl_training.commands.init import init
from lightningrl_training.progress import LiveProgress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.session import train_run

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "panel.svg"
COMMAND = "lightningrl train first"
WIDTH = 88


def main(folder: Path) -> None:
    init(folder / "first")
    recipe, plugins = load_recipe(folder / "first", {}), load_plugins()
    parts = build_checked(recipe, plugins)
    progress = LiveProgress(Console(width=WIDTH, stderr=True))
    plugins.register(progress)
    run = RunFolder.create(folder / "run", recipe, str(folder / "first"), {}, models=parts.models, overwrite=False)
    try:
        with progress:
            state = asyncio.run(train_run(recipe, parts, plugins, run, progress, lambda address: None))
    finally:
        run.close()
    picture = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    picture.print(f"[dim]$[/] {COMMAND}", highlight=False)
    picture.print(progress)
    picture.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes", highlight=False)
    picture.save_svg(str(PICTURE), title=COMMAND, unique_id="lightningrl-panel")
    without_fonts = re.sub(
        r"@font-face \{.*?\}\s*", "", PICTURE.read_text(), flags=re.DOTALL
    )  # a picture loads nothing from elsewhere
    PICTURE.write_text("\n".join(line.rstrip() for line in without_fonts.splitlines()) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
