"""A newcomer's mistakes, planted one by one into what `lightningrl init` makes: what is said, after how many seconds, and whether the
remedy that is said works when it is typed in.

    python benchmarks/planted_mistakes.py [--remedies] [NAME ...]

A sentence may take 5 seconds, 10 where torch must be imported, on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TRAIN = ("train", ".", "--set", "loop.steps=1", "--set", "validation.every=0", "--run", "run")
Edit = tuple[str, str, str]
"""File, what stands there, what is to stand there; nothing there = at the end."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake."""

    name: str
    edits: tuple[Edit, ...] = ()
    says: str
    """Regular expression of the sentence."""
    arguments: tuple[str, ...] = ()
    """After `lightningrl train .`"""
    remedy: tuple[Edit, ...] | None = None
    """What the sentence says to do, done to the mistake; None = the arguments or edits are taken back."""
    needs_torch: bool = False


def in_recipe(old: str, new: str) -> tuple[Edit, ...]:
    return (("recipe.toml", old, new),)


MISTAKES = (
    Mistake(name="groupsize", edits=in_recipe("group_size", "groupsize"), says="did you mean 'group_size'"),
    Mistake(name="[learners]", edits=in_recipe("[learner]", "[learners]"), says="did you mean 'learner'"),
    Mistake(name="--set loop.stpes=3", arguments=("--set", "loop.stpes=3"), says="did you mean 'steps'"),
    Mistake(
        name="learning_rate in [sampling]",
        edits=in_recipe("[sampling]\n", "[sampling]\nlearning_rate = 1e-3\n"),
        says=r"learning_rate.*\[?learner",
    ),
    Mistake(name="learner.lr", edits=in_recipe("learning_rate = 1e-3", "lr = 1e-3"), says="learning_rate"),
    Mistake(name='learning_rate = "1e-5"', edits=in_recipe("learning_rate = 1e-3", 'learning_rate = "1e-3"'), says="learning_rate.*number"),
    Mistake(name='steps = "two"', edits=in_recipe("steps = 15", 'steps = "two"'), says="steps", arguments=("--set", "loop.group_size=8")),
    Mistake(name="model ./no-such", edits=in_recipe('"starter"', '"./no-such"'), says="no folder .*no-such"),
    Mistake(name="model no-such", edits=in_recipe('"starter"', '"no-such"'), says="no-such.*(folder|hub)"),
    Mistake(name="credit gpro", edits=in_recipe('"dr_grpo"', '"gpro"'), says="did you mean '(dr_)?grpo'"),
    Mistake(name="adapter langgraph", edits=in_recipe("[tasks]", 'adapters = ["langgraph"]\n[tasks]'), says="langgraph.*langchain"),
    Mistake(name="--backend nope", arguments=("--backend", "nope"), says="no trainer backend named 'nope'.*torch"),
    Mistake(name="agent file missing", edits=in_recipe("agent.py:", "agnet.py:"), says="agnet.py.*relative to the recipe"),
    Mistake(name="agent without a name", edits=in_recipe("agent.py:answer", "agent.py"), says="write 'agent.py:answer'"),
    Mistake(name="agent has no such function", edits=in_recipe("agent.py:answer", "agent.py:anwser"), says="has no 'anwser'.*answer"),
    Mistake(
        name="agent's import fails",
        edits=(("agent.py", "import functools", "import functools\nimport not_there"),),
        says="No module named 'not_there'",
    ),
    Mistake(
        name="agent takes two arguments",
        edits=(("agent.py", "def answer(date: str)", "def answer(date: str, db)"),),
        says=r"answer.*\(.*db\).*task|task.*db",
    ),
    Mistake(
        name="reward takes two arguments",
        edits=(("reward.py", "(task, output, trajectory)", "(task, output)"),),
        says=r"\(task, output, trajectory\)",
    ),
    Mistake(name="reward file has no such function", edits=in_recipe("reward.py:right", "reward.py:wrong"), says="has no 'wrong'.*right"),
    Mistake(
        name="no [rewards]",
        edits=in_recipe('[rewards.right]\nuse = "reward.py:right"\n', ""),
        says=r"\[rewards",
        remedy=in_recipe("[credit]", '[rewards.right]\nuse = "reward.py:right"\n[credit]'),
    ),
    Mistake(
        name="group_size 1 with a group method",
        edits=in_recipe("group_size = 8", "group_size = 1"),
        says="group_size above 1.*reinforce",
        remedy=in_recipe('"dr_grpo"', '"reinforce"'),
    ),
    Mistake(
        name="discounted without turn rewards",
        edits=in_recipe('"dr_grpo"', '"discounted"'),
        says=r"\[intermediate_rewards\.NAME\]",
        remedy=in_recipe("[sampling]\n", '[intermediate_rewards.tools]\nuse = "tool_status"\n[sampling]\n'),
    ),
    Mistake(
        name="max_tokens beyond the context",
        edits=in_recipe("max_tokens = 12\n\n", "max_tokens = 100000\n\n"),
        says="max_tokens is 100000.*sampling.max_tokens=",
    ),
    Mistake(name="device cuda", edits=in_recipe("[learner]\n", '[learner]\ndevice = "cuda"\n'), says="device.*cuda", needs_torch=True),
    Mistake(name="dtype bf16", edits=in_recipe("[learner]\n", '[learner]\ndtype = "bf16"\n'), says="'float32' or 'bfloat16'"),
    Mistake(name="two tasks of one id", edits=(("tasks.py", "", "\ntrain = lambda: [{'id': 'a', 'input': 'x'}] * 2\n"),), says="id 'a'"),
    Mistake(name="logger wandb is missing", edits=in_recipe("[tasks]", 'loggers = ["wandb"]\n[tasks]'), says="pip install"),
    Mistake(name="no such recipe", arguments=("nowhere.toml",), says="nowhere.toml"),
)


def make_project(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "lightningrl.cli", "init", str(folder)], check=True, capture_output=True)


def edit(folder: Path, edits: tuple[Edit, ...]) -> None:
    for name, old, new in edits:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise SystemExit(f"{name} has no {old!r}: mend this script")
        path.write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")


def run(folder: Path, arguments: tuple[str, ...]) -> tuple[int, str, float]:
    """Exit status, all that was printed, seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "lightningrl.cli", *arguments]
    ran = subprocess.run(command, cwd=folder, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr, time.perf_counter() - began


def remedy_works(mistake: Mistake, folder: Path, project: Path) -> bool:
    """Whether a step trains once the mistake is mended as its sentence says."""
    if mistake.remedy is None:
        shutil.rmtree(folder)
        shutil.copytree(project, folder)
    else:
        edit(folder, mistake.remedy)
    code, printed, _ = run(folder, TRAIN)
    return code == 0 or "nothing was learned in 1 steps" in printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--remedies", action="store_true", help="train a step with each remedy")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "project"
        make_project(project)
        for index, mistake in enumerate(MISTAKES):
            if options.names and mistake.name not in options.names:
                continue
            folder = Path(scratch) / str(index)
            shutil.copytree(project, folder)
            edit(folder, mistake.edits)
            replaces = mistake.arguments and not mistake.arguments[0].startswith("-")
            code, printed, seconds = run(folder, ("train", *mistake.arguments) if replaces else (*TRAIN, *mistake.arguments))
            sentence = next((line for line in printed.splitlines() if re.search(mistake.says, line)), None)
            is_wrong = sentence is None or code == 0 or (folder / "run").exists() or seconds > (10 if mistake.needs_torch else 5)
            print(f"{mistake.name:36} {seconds:4.1f} s  {sentence or f'NOT SAID (exit {code}): {printed[-300:]}'}", flush=True)
            if options.remedies and not remedy_works(mistake, folder, project):
                print(f"{'':44} and the remedy does not work", flush=True)
                is_wrong = True
            failures += is_wrong
    print(
        f"RESULT {failures} of {len(options.names or MISTAKES)} answered late, without a remedy that works, or after a run folder was made"
    )
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
