"""A newcomer's mistakes, planted one by one into what `lightningrl init` makes: what is said, after how many CPU
seconds, and whether the remedy that is said works when it is typed in.

    python tests/support/planted_mistakes.py [--remedies] [NAME ...]

A sentence may take 5 CPU seconds, 10 where torch must be imported: what an idle machine takes at most. What only
rollouts show is said at the end of the step.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TRAIN = ("train", ".", "--set", "loop.steps=1", "--set", "validation.every=0", "--run", "run")
RESUMES = r".*go on with `lightningrl (train --resume --run run)`"
CALL = "    reply = client()"
"""Of the agent; before it stands what an edit puts in."""
TRIES = "    try: client().chat.completions.create(model='m', messages=messages)\n    except Exception: return ''\n"
"""And says nothing of what went wrong."""
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
    remedy: tuple[Edit, ...] = ()
    """What the sentence says to do, done to the mistake: `<1>` is what its first group says."""
    remedy_command: tuple[str, ...] = ()
    """A command of ours to begin with."""
    remedy_arguments: tuple[str, ...] = ()
    """In the place of `arguments`."""
    needs_torch: bool = False
    """It is imported before, or meanwhile: a worker says what is wrong with the agent while the weights are loaded."""
    trains: bool = False
    """It is warned of, and trained nevertheless: its seconds are those of a step."""
    is_seen_in_a_step: bool = False
    """Nobody can say it before rollouts have run: its seconds are those of a step, and there is a run folder."""
    goes_on: bool = False
    """With the run that is there: `remedy_arguments` are all of our command."""
    is_begun: bool = False
    """It is made in a run that has begun."""


def in_recipe(old: str, new: str) -> tuple[Edit, ...]:
    return (("recipe.toml", old, new),)


MISTAKES = (
    Mistake(
        name="groupsize",
        edits=in_recipe("group_size", "groupsize"),
        says="did you mean '(group_size)'",
        remedy=in_recipe("groupsize", "<1>"),
    ),
    Mistake(
        name="[learners]",
        edits=in_recipe("[learner]", "[learners]"),
        says="did you mean '(learner)'",
        remedy=in_recipe("[learners]", "[<1>]"),
    ),
    Mistake(
        name="--set loop.stpes=1",
        arguments=("--set", "loop.stpes=1"),
        says="did you mean '(steps)'",
        remedy_arguments=("--set", "loop.<1>=1"),
    ),
    Mistake(
        name="learning_rate in [sampling]",
        edits=(
            *in_recipe("learning_rate = 1e-3 #", "#"),
            *in_recipe("[sampling]\n", "[sampling]\nlearning_rate = 1e-3\n"),
        ),
        says=r"'learner\.(learning_rate)', which belongs in (\[learner\])",
        remedy=(*in_recipe("learning_rate = 1e-3\n", ""), *in_recipe("[learner]\n", "<2>\n<1> = 1e-3\n")),
    ),
    Mistake(
        name="learner.lr",
        edits=in_recipe("learning_rate = 1e-3", "lr = 1e-3"),
        says="did you mean '(learning_rate)'",
        remedy=in_recipe("lr = 1e-3", "<1> = 1e-3"),
    ),
    Mistake(
        name='learning_rate = "1e-5"',
        edits=in_recipe("learning_rate = 1e-3", 'learning_rate = "1e-3"'),
        says="learning_rate.*number",
        remedy=in_recipe('"1e-3"', "1e-3"),
    ),
    Mistake(
        name='steps = "two"',
        edits=in_recipe("steps = 15", 'steps = "two"'),
        says="'loop.steps'.*valid integer",
        arguments=("--set", "loop.group_size=8"),
        remedy=in_recipe('"two"', "2"),
    ),
    Mistake(
        name="model ./no-such",
        edits=in_recipe('"starter"', '"./no-such"'),
        says="no folder './no-such'; give a transformers folder",
        remedy=in_recipe('"./no-such"', '"./starter"'),
    ),
    Mistake(
        name="model no-such",
        edits=in_recipe('"starter"', '"no-such"'),
        says="no-such.*(folder|hub).*make a small one: lightningrl (init) (my-agent)",
        remedy_command=("<2>", "<3>"),
        remedy=in_recipe('"no-such"', '"<3>/starter"'),
    ),
    Mistake(
        name="credit gpro",
        edits=in_recipe('"dr_grpo"', '"gpro"'),
        says="did you mean '((dr_)?grpo)'",
        remedy=in_recipe('"gpro"', '"<1>"'),
    ),
    Mistake(
        name="adapter langgraph",
        edits=in_recipe("[tasks]", 'adapters = ["langgraph"]\n[tasks]'),
        says="'langgraph'; installed: .*(langchain)",
        remedy=in_recipe('"langgraph"', '"<1>"'),
    ),
    Mistake(
        name="--backend nope",
        arguments=("--backend", "nope"),
        says="no trainer backend named 'nope'.*(torch)",
        remedy_arguments=("--backend", "<1>"),
    ),
    Mistake(
        name="agent file missing",
        edits=in_recipe("agent.py:", "agnet.py:"),
        says="agnet.py.*relative to the recipe",
        remedy=in_recipe("agnet.py:", "agent.py:"),
    ),
    Mistake(
        name="agent without a name",
        edits=in_recipe("agent.py:answer", "agent.py"),
        says="write '(agent.py:answer)'",
        remedy=in_recipe('"agent.py"', '"<1>"'),
    ),
    Mistake(
        name="agent has no such function",
        edits=in_recipe("agent.py:answer", "agent.py:anwser"),
        says=r"has no 'anwser'; it has: .*\b(answer)\b",
        remedy=in_recipe("agent.py:anwser", "agent.py:<1>"),
        needs_torch=True,
    ),
    Mistake(
        name="agent's import fails",
        edits=(("agent.py", "import functools", "import functools\nimport not_there"),),
        says="No module named 'not_there'; fix it",
        remedy=(("agent.py", "import not_there\n", ""),),
        needs_torch=True,
    ),
    Mistake(
        name="agent takes two arguments",
        edits=(("agent.py", "def answer(date: str)", "def answer(date: str, db)"),),
        says=r"takes \(date, db\).*give the others defaults",
        remedy=(("agent.py", "db)", "db=None)"),),
        needs_torch=True,
    ),
    Mistake(
        name="reward takes two arguments",
        edits=(("reward.py", "(task, output, trajectory)", "(task, output)"),),
        says=r"called with (\(task, output, trajectory\))",
        remedy=(("reward.py", "(task, output)", "<1>"),),
    ),
    Mistake(
        name="reward file has no such function",
        edits=in_recipe("reward.py:right", "reward.py:wrong"),
        says="has no 'wrong'; it has: (right)",
        remedy=in_recipe("reward.py:wrong", "reward.py:<1>"),
    ),
    Mistake(
        name="no [rewards]",
        edits=in_recipe('[rewards.right]\nuse = "reward.py:right"\n', ""),
        says=r'(\[rewards\.right\]) (use = "reward.py:right")',
        remedy=in_recipe("[credit]", "<1>\n<2>\n[credit]"),
    ),
    Mistake(
        name="group_size 1 with a group method",
        edits=in_recipe("group_size = 8", "group_size = 1"),
        says="group_size above 1.*credit.use = '(reinforce)'",
        remedy=in_recipe('"dr_grpo"', '"<1>"'),
    ),
    Mistake(
        name="turns without turn rewards",
        edits=in_recipe('"dr_grpo"', '"turns"'),
        says=r"add an \[(intermediate_rewards)\.NAME\] table",
        remedy=in_recipe("[sampling]\n", '[<1>.tools]\nuse = "tool_status"\n[sampling]\n'),
    ),
    Mistake(
        name="max_tokens beyond the context",
        edits=in_recipe("max_tokens = 12\n\n", "max_tokens = 100000\n\n"),
        says=r"max_tokens is 100000.*(--set) (sampling\.max_tokens=\d+)",
        remedy_arguments=("<1>", "<2>"),
    ),
    Mistake(
        name="device cuda",
        edits=in_recipe("[learner]\n", '[learner]\ndevice = "cuda"\n'),
        says="device is 'cuda'.*use '(auto)'",
        needs_torch=True,
        remedy=in_recipe('"cuda"', '"<1>"'),
    ),
    Mistake(
        name="dtype bf16",
        edits=in_recipe("[learner]\n", '[learner]\ndtype = "bf16"\n'),
        says="choose 'float32' or '(bfloat16)'",
        remedy=in_recipe('"bf16"', '"<1>"'),
    ),
    Mistake(
        name="two tasks of one id",
        edits=(("tasks.py", "", "\ntrain = lambda: [{'id': 'a', 'input': 'x'}] * 2\n"),),
        says="two tasks have the id 'a'; ids must differ",
        remedy=(("tasks.py", "[{'id': 'a', 'input': 'x'}] * 2", "[{'id': name, 'input': 'x'} for name in 'ab']"),),
    ),
    Mistake(
        name="one task, eight a step",
        edits=(("tasks.py", "", "\ntrain = lambda: [{'id': 'a', 'input': 'x'}]\n"),),
        says=r"tasks_per_step is 8, but there is 1 training task.*set (loop\.tasks_per_step=1)",
        trains=True,
        remedy_arguments=("--set", "<1>"),
    ),
    Mistake(
        name="logger wandb is missing",
        edits=in_recipe("[tasks]", 'loggers = ["wandb"]\n[tasks]'),
        says=r"pip install 'lightningrl\[wandb\]'`, or remove it",
        remedy=in_recipe('loggers = ["wandb"]\n', ""),
    ),
    Mistake(
        name="agent raises",
        edits=(("agent.py", CALL, "    raise KeyError('oops')\n" + CALL),),
        says=r"every rollout failed \(64 agent_error\).*KeyError: 'oops'.*mend the agent" + RESUMES,
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("agent.py", "    raise KeyError('oops')\n", ""),),
        remedy_arguments=("<1>",),
    ),
    Mistake(
        name="agent hangs",
        edits=(("agent.py", CALL, "    import time; time.sleep(100_000)\n" + CALL),),
        arguments=("--set", "runtime.timeout_s=5", "--set", "loop.tasks_per_step=1", "--set", "runtime.workers=1"),
        says=r"longer than its time limit of 5 s.*mend the agent" + RESUMES,
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("agent.py", "    import time; time.sleep(100_000)\n", ""),),
        remedy_arguments=("<1>",),
    ),
    Mistake(
        name="agent returns an object",
        edits=(("agent.py", 'return (reply.choices[0].message.content or "").strip()', "return reply"),),
        says=r"is not JSON.*return text, numbers, lists or dicts.*mend the agent" + RESUMES,
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("agent.py", "return reply", 'return (reply.choices[0].message.content or "").strip()'),),
        remedy_arguments=("<1>",),
    ),
    Mistake(
        name="agent calls a model elsewhere",
        edits=(
            (
                "agent.py",
                "functools.cache(OpenAI)",
                "functools.cache(lambda: OpenAI(base_url='http://localhost:9/v1', max_retries=0))",
            ),
            ("agent.py", CALL, TRIES + CALL),
        ),
        says=r"none of 64 rollouts made a model call that came here: the agent called models at '(\S+)'.*name them in (runtime\.base_urls)",
        is_seen_in_a_step=True,
        remedy_arguments=("--set", '<2>=["<1>"]'),
    ),
    Mistake(
        name="agent makes no model call",
        edits=(("agent.py", CALL, "    return ''\n" + CALL),),
        says=r"none of 64 rollouts made a model call that came here; where the agent's client has a base URL of its own, name it in",
        is_seen_in_a_step=True,
        remedy=(("agent.py", "    return ''\n", ""),),
    ),
    Mistake(
        name="agent swallows a refused call",
        edits=(
            ("agent.py", "words: {date}", "words: {date * 5000}"),
            ("agent.py", CALL, TRIES + CALL),
        ),
        says=r"every model call was refused \(64\).*(context|tokens)",
        is_seen_in_a_step=True,
        remedy=(("agent.py", "{date * 5000}", "{date}"),),
    ),
    Mistake(
        name="reward returns text",
        edits=(("reward.py", "return float(output == task.answer)", 'return "1.0"'),),
        says=r"reward 'right' returned '1.0' of type str.*return a (float)",
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("reward.py", 'return "1.0"', "return <1>(output == task.answer)"),),
        remedy_arguments=("train --resume --run run",),
    ),
    Mistake(
        name="reward raises",
        edits=(("reward.py", "return float(", "return task.gold or float("),),
        says=r"right: AttributeError: 'Task' object has no attribute 'gold' \(reward\.py, line \d+\); mend it",
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("reward.py", "task.gold or ", ""),),
        remedy_arguments=("train --resume --run run",),
    ),
    Mistake(
        name="reward says nothing",
        edits=(("reward.py", "return float(", "float("),),
        says=r"no rollout of 64 has a reward; check that the rewards return numbers" + RESUMES,
        is_seen_in_a_step=True,
        goes_on=True,
        remedy=(("reward.py", "    float(", "    return float("),),
        remedy_arguments=("<1>",),
    ),
    Mistake(
        name="role misspelt",
        edits=(
            ("agent.py", CALL, "    from lightningrl import role\n    with role('writer'): reply = client()"),
            *in_recipe("[policy]\n", '[policy]\ntrained_agents = ["writr"]\n'),
        ),
        says=r"no call is of a policy and role that is trained; roles of the calls: '(writer)'",
        is_seen_in_a_step=True,
        remedy=in_recipe('"writr"', '"<1>"'),
    ),
    Mistake(
        name="another learning rate on the way",
        is_begun=True,
        arguments=(".", "--resume", "--run", "run", "--set", "learner.learning_rate=1e-4"),
        says=r"'learner.learning_rate' was 0.001, is 0.0001; restore it \(`(--set \S+)`\), or start a new run",
        goes_on=True,
        remedy_arguments=("train . --resume --run run <1>",),
    ),
    Mistake(name="no such recipe", arguments=("nowhere.toml",), says="nowhere.toml.*folder with a recipe.toml"),
)


def make_project(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "lightningrl", "init", str(folder)], check=True, capture_output=True)


def edit(folder: Path, edits: tuple[Edit, ...]) -> None:
    for name, old, new in edits:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise SystemExit(f"{name} has no {old!r}: mend this script")
        path.write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")


def run(folder: Path, arguments: tuple[str, ...]) -> tuple[int, str, float]:
    """Exit status, all that was printed, CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "lightningrl", *arguments]
    ran = subprocess.run(
        command, cwd=folder, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ran.returncode, ran.stdout + ran.stderr, seconds


def trains(code: int, printed: str) -> bool:
    return code == 0 or "nothing was learned in 1 steps" in printed


def typed_in(words: tuple[str, ...], sentence: re.Match[str]) -> tuple[str, ...]:
    """The words with what the sentence says for `<1>`, `<2>` and so on."""
    return tuple(re.sub(r"<(\d)>", lambda number: sentence[int(number[1])] or "", word) for word in words)


def remedied(mistake: Mistake, folder: Path, sentence: re.Match[str]) -> None:
    """Edit the files as the sentence says."""
    edit(folder, tuple((name, old, typed_in((new,), sentence)[0]) for name, old, new in mistake.remedy))


def remedy_works(mistake: Mistake, folder: Path, sentence: re.Match[str]) -> bool:
    """Whether a step trains, and the sentence is not said again, once the mistake is mended as it says."""
    if mistake.remedy_command and run(folder, typed_in(mistake.remedy_command, sentence))[0] != 0:
        return False
    remedied(mistake, folder, sentence)
    arguments = typed_in(mistake.remedy_arguments, sentence)
    if mistake.goes_on:
        code, printed, _ = run(folder, tuple(" ".join(arguments).split()))
    else:
        shutil.rmtree(folder / "run", ignore_errors=True)
        code, printed, _ = run(folder, (*TRAIN, *arguments))
    return trains(code, printed) and not re.search(mistake.says, printed)


def is_answered(
    mistake: Mistake, folder: Path, sentence: re.Match[str] | None, code: int, printed: str, seconds: float
) -> bool:
    if mistake.trains:
        return sentence is not None and trains(code, printed)
    if mistake.is_seen_in_a_step:
        return sentence is not None and code != 0
    in_time = seconds <= (10 if mistake.needs_torch else 5)
    return sentence is not None and code != 0 and (folder / "run").exists() == mistake.is_begun and in_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--remedies", action="store_true", help="train a step with each remedy")
    parser.add_argument("--project", type=Path, help="what `lightningrl init` made; left out: it is made")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    asked = [mistake for mistake in MISTAKES if not options.names or mistake.name in options.names]
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        project = options.project or Path(scratch) / "project"
        if options.project is None:
            make_project(project)
        for index, mistake in enumerate(asked):
            folder = Path(scratch) / str(index)
            shutil.copytree(project, folder)
            edit(folder, mistake.edits)
            if mistake.is_begun:
                run(folder, TRAIN)
            replaces = mistake.arguments and not mistake.arguments[0].startswith("-")
            code, printed, seconds = run(
                folder, ("train", *mistake.arguments) if replaces else (*TRAIN, *mistake.arguments)
            )
            sentence = re.search(mistake.says, printed)
            said = f"NOT SAID (exit {code}): {printed[-300:]}" if sentence is None else whole_line(printed, sentence)
            is_well = is_answered(mistake, folder, sentence, code, printed, seconds)
            print(f"{mistake.name:36} {seconds:4.1f} s  {said}", flush=True)
            if options.remedies and is_well and sentence is not None and not remedy_works(mistake, folder, sentence):
                print(f"{'':44} and the remedy does not work", flush=True)
                is_well = False
            failures += not is_well
    print(
        f"RESULT {failures} of {len(asked)} answered late, without a remedy that works, or after a run folder was made"
    )
    raise SystemExit(bool(failures) or not asked)


def whole_line(printed: str, sentence: re.Match[str]) -> str:
    return next(line for line in printed[printed.rfind("\n", 0, sentence.start()) + 1 :].splitlines())


if __name__ == "__main__":
    main()
