"""The doctor: tries a recipe before it is trained, on a few real rollouts and learning steps, and estimates the whole
run.

recipe ─► examine ─► Observation ─► each row of CHECKS ─► Finding (pass, warn, fail; evidence; remedy)
                         └─► make_bill ─► tokens, minutes, memory, disk
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lightningrl.errors import ConfigError, LightningError, PluginError
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.sanitize import one_line
from lightningrl_training.doctor import agent_checks, recipe_checks, reward_attack, signal_checks
from lightningrl_training.doctor.bill import Bill, make_bill
from lightningrl_training.doctor.findings import LONGEST, Check, Diagnosis, Finding, Row, Verdict, failed, passed
from lightningrl_training.doctor.observation import Observation

__all__ = ["CHECKS", "Bill", "Diagnosis", "Observation", "Verdict", "diagnose", "examine"]

CHECKS: tuple[Check, ...] = (
    Check(name="calls", asks="does the agent call the policy", look=agent_checks.calls_made),
    Check(name="errors", asks="does the agent end without raising", look=agent_checks.errors),
    Check(name="time", asks="do rollouts have time enough", look=agent_checks.time_limit),
    Check(name="captured", asks="is each sampled call recorded once", look=agent_checks.calls_captured),
    Check(name="retries", asks="is a retry one call", look=agent_checks.retries_counted_once),
    Check(name="roles", asks="are the recipe's roles those of the calls", look=agent_checks.roles_named),
    Check(name="histories", asks="do calls keep the tokens of earlier ones", look=agent_checks.histories_kept),
    Check(name="context", asks="do prompts leave room for answers", look=agent_checks.context_used),
    Check(name="markup", asks="can its tool calls be read", look=agent_checks.markup_readable),
    Check(name="cut off", asks="do answers end by themselves", look=agent_checks.calls_cut_off),
    Check(name="tools", asks="do tools work", look=agent_checks.tools_work),
    Check(name="repeats", asks="does the agent do the same again", look=agent_checks.repeats_itself),
    Check(name="sampling", asks="is each member of a group sampled for itself", look=signal_checks.sampling_free),
    Check(name="rewards", asks="does every rollout get a proper reward", look=signal_checks.rewards_given),
    Check(name="attacks", asks="do rewards pay for what is worth nothing", look=reward_attack.rewards_stand),
    Check(name="variety", asks="do rewards differ within groups", look=signal_checks.reward_varies),
    Check(name="learning", asks="does reward reach the sampled tokens", look=signal_checks.reward_reaches_tokens),
    Check(name="gain", asks="what is left to gain", look=signal_checks.rewards_to_gain),
    Check(name="settings", asks="is every setting read", look=recipe_checks.settings_read),
    Check(name="tasks", asks="are tasks different, and held-out ones held out", look=recipe_checks.tasks_differ),
    Check(name="memory", asks="does it fit into memory", look=recipe_checks.memory_enough),
    Check(name="disk", asks="does the run fit on the disk", look=recipe_checks.disk_enough),
)
"""A new check is a function of an `Observation` and a row here."""


async def examine(
    recipe: Recipe,
    *,
    wrong: Sequence[str] = (),
    runs: Path = Path("runs"),
    rehearse: float = 0.0,
    starting: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Try the recipe and report what was found. A fault of the recipe is a finding, not an error.

    `wrong`: sentences on keys that the recipe is read without. `runs`: the folder that its runs will be written to.
    `rehearse`: seconds for steps after the first. `starting` is told what is being tried.
    """
    from lightningrl_training.checks import build_checked
    from lightningrl_training.doctor.examination import Clock, observe
    from lightningrl_training.memory_check import check_memory
    from lightningrl_training.warm_start import explain_warm_start

    refuse_in_import("lightningrl.doctor")
    if recipe.runtime.workers == 0:
        alone = "runtime.workers is 0, so no worker would run the agent here"
        return _refused("look with workers: --set runtime.workers=2", alone)
    starting("the recipe")
    clock = Clock()
    try:
        parts = build_checked(recipe, load_plugins(), wrong=[*wrong, *explain_warm_start(recipe)])
        check_memory(recipe, parts.models, load_plugins())
    except (ConfigError, PluginError) as error:
        return _refused("mend the recipe; nothing was tried", *map(str, error.args))
    with tempfile.TemporaryDirectory(prefix="lightningrl-doctor-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        try:
            seen = await observe(recipe, parts, scratch, runs, starting, rehearse=rehearse, clock=clock)
        except LightningError as error:
            return _refused("mend that; nothing more was tried", _with_log(str(error), scratch))
    return diagnose(seen)


def diagnose(seen: Observation) -> Diagnosis:
    """Run every check on an observation, and make the bill."""
    before = ", of the policy before its warm start" if seen.recipe.warm_start else ""
    tried = passed(f"{len(seen.every)} rollouts were tried with the real agent, server, engine and learner{before}")
    rows = [Row(check=check.name, asks=check.asks, finding=check.look(seen)) for check in CHECKS]
    return Diagnosis(rows=(_start(tried), *rows), bill=make_bill(seen))


def _refused(remedy: str, *sentences: str) -> Diagnosis:
    """Diagnosis of a recipe that cannot be tried."""
    return Diagnosis(rows=tuple(_start(failed(sentence, remedy)) for sentence in sentences), bill=None)


def _start(finding: Finding) -> Row:
    return Row(check="recipe", asks="can it be started", finding=finding)


def _with_log(sentence: str, scratch: Path) -> str:
    """Add the last line of a log that the sentence names: the log goes with the scratch folder."""
    logs = [path.read_text("utf-8", "replace") for path in scratch.glob("logs/*") if str(path) in sentence]
    lines = [line for log in logs for line in log.splitlines() if line.strip()]
    return sentence if not lines else f"{sentence}: {one_line(lines[-1], LONGEST)}"
