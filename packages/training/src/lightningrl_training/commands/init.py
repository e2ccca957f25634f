"""`lightningrl init`: an agent of one's own, from a template."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from lightningrl.errors import LightningError
from lightningrl.scaffold import new_agent

__all__ = ["init_command"]


def init_command(folder: Path) -> None:
    made = new_agent(folder)
    console = Console()
    files = ", ".join(sorted(file.name for file in made.iterdir()))
    console.print(f"made {made}: {files}", highlight=False, markup=False, soft_wrap=True)
    train = f"lightningrl try {shlex.quote(str(made))} && lightningrl train {shlex.quote(str(made))}"
    if importlib.util.find_spec("lightningrl_torch") is None:
        make = f"pip install 'lightningrl[torch]' && python {shlex.quote(str(made / 'starter.py'))}"
        console.print(
            f"the starting policy needs torch:  {make} && {train}", highlight=False, markup=False, soft_wrap=True
        )
        return
    console.print(
        "making its starting policy, a tiny transformer: half a minute, or some on a busy machine", highlight=False
    )
    status = subprocess.run([sys.executable, str(made / "starter.py")], check=False).returncode
    if status:
        raise LightningError(
            f"the starting policy was not made (status {status}); try again: python "
            f"{shlex.quote(str(made / 'starter.py'))}"
        )
    console.print(f"next:  {train}", highlight=False, markup=False, soft_wrap=True)
