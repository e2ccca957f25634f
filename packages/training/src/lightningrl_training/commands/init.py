"""`lightningrl init`: an agent of one's own, from a template."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

from lightningrl.errors import LightningError
from lightningrl.scaffold import new_agent
from lightningrl_training.commands.printing import Page

__all__ = ["init_command"]


def init_command(folder: Path) -> None:
    made = new_agent(folder)
    page = Page()
    starter, quoted = made / "starter.py", shlex.quote(str(made))
    page.print(f"made {made}: {', '.join(sorted(file.name for file in made.iterdir()))}", markup=False)
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
