"""The doctor: before anything is trained, a few real rollouts and learning steps, looked at by a table of checks, and the bill of the whole
run.

recipe ─► examine ─► Observation ─► each row of CHECKS ─► Finding (pass, warn, fail; evidence; remedy)
                         └─► make_bill ─► tokens, minutes, memory, disk
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lightningrl.errors import ConfigError, LightningError, PluginError
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.sanitize import one_line
from lightningrl_training.doctor.bill import Bill, BillLine, make_bill
from lightningrl_training.doctor.checks import CHECKS
from lightningrl_training.doctor.findings import LONGEST, Check, Finding, Verdict, failed, passed
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.doctor.report import Diagnosis, Row

__all__ = ["CHECKS", "Bill", "BillLine", "Check", "Diagnosis", "Finding", "Observation", "Row", "Verdict", "diagnose", "examine"]


async def examine(
    recipe: Recipe,
    *,
    wrong: Sequence[str] = (),
    runs: Path = Path("runs"),
    rehearse: float = 0.0,
    starting: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Try the recipe and say what was found. What is wrong with it is a finding, not an error; `wrong`: what is known of keys that it is
    read without. `runs`: where its runs will be written; `rehearse`: seconds for steps after the first; `starting` is told what is being
    tried."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.doctor.examination import observe

    refuse_in_import("lightningrl.doctor")
    if recipe.runtime.workers == 0:
        alone = "runtime.workers is 0, so no worker would run the agent here"
        return Diagnosis(rows=(_row("recipe", failed(alone, "look with workers: --set runtime.workers=2")),), bill=None)
    starting("the recipe")
    try:
        parts = build_checked(recipe, load_plugins(), wrong=wrong)
    except (ConfigError, PluginError) as error:
        remedy = "mend the recipe; nothing was tried"
        return Diagnosis(rows=tuple(_row("recipe", failed(str(sentence), remedy)) for sentence in error.args), bill=None)
    scratch = Path(tempfile.mkdtemp(prefix="lightningrl-doctor-"))
    try:
        seen = await observe(recipe, parts, scratch, runs, starting, rehearse=rehearse)
    except LightningError as error:
        return Diagnosis(rows=(_row("recipe", failed(_with_log(str(error), scratch), "mend that; nothing more was tried")),), bill=None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return diagnose(seen)


def diagnose(seen: Observation) -> Diagnosis:
    """What the checks find in an observation, and its bill."""
    tried = passed(f"{len(seen.every)} rollouts were tried with the real agent, server, engine and learner")
    rows = [_row("recipe", tried), *(Row(check=check.name, asks=check.asks, finding=check.look(seen)) for check in CHECKS)]
    return Diagnosis(rows=tuple(rows), bill=make_bill(seen))


def _row(check: str, finding: Finding) -> Row:
    return Row(check=check, asks="can it be started", finding=finding)


def _with_log(sentence: str, scratch: Path) -> str:
    """A log that the sentence names goes with the scratch folder: its last line stands here."""
    logs = [path for path in scratch.glob("logs/*") if str(path) in sentence]
    lines = [line for path in logs for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return sentence if not lines else f"{sentence}: {one_line(lines[-1], LONGEST)}"
