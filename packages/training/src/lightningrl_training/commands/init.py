"""`lightningrl init`: an agent of one's own, from a template."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from lightningrl.errors import ConfigError, LightningError
from lightningrl.scaffold import new_agent, new_agent_of_traces
from lightningrl_training.commands.printing import Page

__all__ = ["init"]


def init(
    folder: Annotated[Path, typer.Argument(help="Where to put it.", metavar="FOLDER")] = Path("my-agent"),
    stack: Annotated[
        str,
        typer.Option(
            "--from",
            help="What the agent is written with, or the traces that it left.",
            metavar="openai|langgraph|openai-agents|autogen|traces",
        ),
    ] = "openai",
    rows: Annotated[
        Path | None,
        typer.Option(help="With --from traces: a folder of `lightningrl curate`.", metavar="ROWS", show_default=False),
    ] = None,
) -> None:
    """Write a small agent of your own, its reward, a recipe and a tiny policy made on this machine: it learns in about
    a minute."""
    if (stack == "traces") != (rows is not None):
        raise ConfigError("--from traces and --rows belong together: lightningrl init FOLDER --from traces --rows ROWS")
    made = new_agent(folder, stack) if rows is None else new_agent_of_traces(folder, rows)
    page = Page()
    starter, quoted = made / "starter.py", shlex.quote(str(made))
    page.print(f"made {made}: {', '.join(sorted(file.name for file in made.iterdir()))}", markup=False)
    if rows is not None:
        page.print("put your agent into agent.py, your reward into reward.py and your model into recipe.toml")
        page.print(f"next:  lightningrl try {quoted} && lightningrl train {quoted}", markup=False)
        return
    make, train = f"python {shlex.quote(str(starter))}", f"lightningrl try {quoted} && lightningrl train {quoted}"
    if importlib.util.find_spec("lightningrl_torch") is None:
        install = "the starting policy needs torch:  pip install 'lightningrl[torch]'"
        page.print(f"{install} && {make} && {train}", markup=False)
        return
    page.print("making its starting policy, a tiny transformer: half a minute, or some on a busy machine")
    status = subprocess.run([sys.executable, str(starter)], check=False).returncode
    if status:
        raise LightningError(f"the starting policy was not made (status {status}); try again: {make}")
    page.print(f"next:  {train}", markup=False)
