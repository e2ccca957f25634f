"""Run agents of other frameworks against a real server with a scripted policy, and print what was recorded.

    make frameworks                       all of them; make frameworks ONLY="agno haystack" some
    tests/frameworks/NAME_agent.py        an agent in its framework's own style; its first lines pin what it needs
    tests/frameworks/expected.toml        what the policy says to it, and what has to be recorded
    tests/frameworks/shared.toml          the same for agents with an object that all rollouts share
    tests/frameworks/examples.toml        the same for examples of the frameworks' authors, out of the framework's sdist

NAME_agent.py ─► .frameworks/NAME (environment) ─► lightningrl work ─► server here ─► ROLLOUTS trajectories ─► checks ─►
a row of the table sdist's file ──► a copy of its folder ──► command_agent ──────┘
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightningrl.keys import worker_key
from lightningrl.types import Trajectory
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import RUN_KEY, WholePath, running_services

ROOT: Final = Path(__file__).parents[1]
AGENTS: Final = ROOT / "tests/frameworks"
CACHE: Final = ROOT / ".frameworks"
OURS: Final = [word for name in ("core", "client") for word in ("-e", str(ROOT / "packages" / name))]
ROLLOUTS: Final = 4
WAIT_S: Final = 600.0
"""A rollout's time, and then some for the run."""
BLOCK: Final = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBERED: Final = re.compile(r"answer-\d+")
PINS: Final = re.compile(r"^(?:#|//) dependencies = (\[.*\])$", re.MULTILINE)
RECIPE: Final = """\
agent = "{agent}"
adapters = {adapters}

[tasks]
train = "tasks.py:tasks"

[policy]
model = "policy"

[rewards.none]
use = "tasks.py:score"

[runtime]
workers = {workers}
concurrency = {concurrency}
"""
TASKS: Final = "def tasks():\n    return []\n\n\ndef score(task, output, trajectory):\n    return 0.0\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An agent, what the policy says to it, and what has to be recorded of each rollout."""

    name: str
    says: Mapping[str, Sequence[str]]
    """By a text of the prompt, the first that is in it: what the policy says at its first turn, at its second, …;
    `{task}` is the task."""
    roles: Sequence[str]
    """Of each call, in order; "-" is none."""
    tools: Sequence[str]
    """`name status`, in order."""
    adapters: Sequence[str] = ("opentelemetry",)
    concurrency: int = ROLLOUTS
    """Rollouts at once in one process; 1 = as many processes."""
    outcome: str = "succeeded"
    streams: bool = False
    limits: str = ""
    task: str = "What is the weather in {city}?"
    is_node: bool = False
    example: str = ""
    """A file in the framework's sdist, or `PAGE.md#3`: that page's third block of Python. "" = the agent is of this
    folder."""
    installs: Sequence[str] = ()
    """For an example: what its environment has; the first is the framework."""
    command: str = "python {file}"
    """For an example: how a user starts it, in a copy of its folder; `{sdist}` is all that came with it."""

    @property
    def file(self) -> str:
        return f"{self.name}_agent.{'mjs' if self.is_node else 'py'}"

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def packages(self) -> list[str]:
        """What is installed for it; the first is the framework."""
        if self.example:
            return list(self.installs)
        found = PINS.search((AGENTS / self.file).read_text())
        if found is None:
            raise SystemExit(f"{self.file} pins nothing; begin it with a line `dependencies = […]`")
        return list(json.loads(found[1]))


@dataclass(kw_only=True, slots=True)
class Row:
    """What became of a case."""

    case: Case
    trajectories: list[Trajectory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load_cases() -> list[Case]:
    files = "expected.toml", "shared.toml", "examples.toml"
    found = [tomllib.loads((AGENTS / file).read_text()) for file in files]
    return [Case(name=name, **values) for values_by_name in found for name, values in values_by_name.items()]


def install(case: Case) -> None:
    """Its environment, made anew where the pins have changed."""
    pins = "\n".join(case.packages)
    mark = case.folder / "installed.txt"
    if mark.exists() and mark.read_text() == pins:
        return
    shutil.rmtree(case.folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    if case.is_node:
        case.folder.mkdir(parents=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(case.folder), *case.packages], check=True)
    else:
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(case.folder)], check=True)
        environment = {**os.environ, "VIRTUAL_ENV": str(case.folder)}
        ours = [] if case.example else OURS  # a program has nothing of ours
        command = [uv, "pip", "install", "--quiet", *ours, *case.packages]
        subprocess.run(command, check=True, env=environment, cwd=ROOT)
    if case.example:
        download_sdist(case)
    mark.write_text(pins)


def download_sdist(case: Case) -> None:
    """What the authors ship beside the package itself: examples, tests, pages."""
    name = re.split(r"[\[=]", case.packages[0])[0]
    with tempfile.TemporaryDirectory(prefix="sdist-") as folder:
        command = ["download", "--quiet", "--no-deps", "--no-binary", name, "--dest", folder, case.packages[0]]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        [archive] = Path(folder).iterdir()
        shutil.unpack_archive(archive, case.folder / "sdist", filter="data")


def example_command(case: Case) -> str:
    """The example as its users start it, in a folder of its own for each rollout: some write files beside
    themselves."""
    [sdist] = (case.folder / "sdist").iterdir()
    path, _, block = case.example.partition("#")
    file = sdist / path
    if block:
        file = sdist / f"block-{block}" / "example.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(BLOCK.findall((sdist / path).read_text())[int(block) - 1])
    started = case.command.format(file=file.name, sdist=sdist)
    return f'cd "$(mktemp -d)" && cp -r {file.parent}/. . && {started}'


def build_policy(case: Case) -> Any:
    """What the engine answers: the case's text for this prompt and this turn, without what the prompt has begun
    already.

    `{answer}` in it is never said twice: where a prompt has it, its rollout was the one that was told so.
    `call Name_* {…}` is a tool whose name goes on as the prompt has it.
    """
    numbers = itertools.count()

    def reply(prompt: str) -> str:
        turns = prompt.split("<|im_start|>")
        begun = turns[-1].removeprefix("assistant\n")
        turn = sum(part.startswith("assistant\n") for part in turns) - 1
        texts = next((texts for key, texts in case.says.items() if key in prompt), ["nobody wrote what to say here"])
        cities = re.findall(r"city-\d+", prompt)
        said = texts[min(turn, len(texts) - 1)].replace("{city}", cities[0] if cities else "nowhere")
        said = re.sub(r"(?<=call )(\w+)\*", lambda name: re.findall(rf"{name[1]}\w+", prompt)[0], said)
        text = written(said.replace("{answer}", f"answer-{next(numbers)}"))
        return text.removeprefix(begun.rstrip()).lstrip() if begun else text

    return reply


def written(text: str) -> str:
    """`call name {…}` lines are tool calls."""
    lines = []
    for line in text.split("\n"):
        found = re.fullmatch(r"call (\S+) (.*)", line)
        lines.append(
            line if found is None else f'<tool_call>\n{{"name": "{found[1]}", "arguments": {found[2]}}}\n</tool_call>'
        )
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def workers(case: Case, path: WholePath, folder: Path, spans: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`lightningrl work` in the framework's environment, as its user runs it."""
    many = case.concurrency > 1
    is_program = case.is_node or bool(case.example)
    runs = (
        "example_agent.py"
        if case.example
        else "node_agent.py"
        if case.is_node
        else "record_spans.py"
        if spans
        else case.file
    )
    recipe = RECIPE.format(
        agent=f"{AGENTS / runs}:answer",
        adapters=json.dumps(list(case.adapters)),
        workers=1 if many else 2,
        concurrency=case.concurrency,
    )
    (folder / "recipe.toml").write_text(recipe)
    (folder / "tasks.py").write_text(TASKS)
    bin_folder = Path(sys.executable).parent if is_program else case.folder / "bin"
    environment = {**os.environ, "LIGHTNINGRL_KEY": worker_key(RUN_KEY), "PYTHONWARNINGS": "ignore", "SPANS": spans}
    environment["AGENT"] = f"{AGENTS / case.file}:answer"
    if case.is_node:  # which looks for packages beside the file
        environment["AGENT"] = str(shutil.copy(AGENTS / case.file, case.folder))
    if case.example:
        path_variable = os.pathsep.join((str(case.folder / "bin"), str(bin_folder), os.environ["PATH"]))
        environment |= {
            "AGENT": example_command(case),
            "PATH": path_variable,
            "TMPDIR": str(folder),
            "OTEL_METRICS_EXPORTER": "none",
        }
    with (folder / "work.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(bin_folder / "lightningrl"), "work", "recipe.toml", "--server", path.url,
            cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


async def try_case(case: Case, *, show: bool, spans: str = "") -> Row:
    row = Row(case=case)
    engine = ScriptedEngine(tiny_tokenizer(), reply=build_policy(case), chunk_tokens=8)
    with tempfile.TemporaryDirectory(prefix="frameworks-") as name:
        folder = Path(name)
        async with running_services(folder, engine=engine) as path, workers(case, path, folder, spans) as process:
            inputs = {f"r{number}": case.task.format(city=f"city-{number}") for number in range(ROLLOUTS)}
            run = asyncio.create_task(path.run(inputs, wait_s=2 * WAIT_S, timeout_s=WAIT_S))
            ended = asyncio.create_task(process.wait())
            await asyncio.wait({run, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if run.done() and not run.exception():
                row.trajectories = run.result()
                row.problems = [
                    problem for trajectory in row.trajectories for problem in check(case, trajectory, engine)
                ]
            else:
                why = repr(run.exception()) if run.done() else "the worker ended"
                run.cancel()
                row.problems = [f"{why}: {(folder / 'work.log').read_text()[-3000:]}"]
        if show:
            for trajectory in row.trajectories[:1]:
                print(told(trajectory, engine))
            print((folder / "work.log").read_text()[-3000:])
    return row


def check(case: Case, trajectory: Trajectory, engine: ScriptedEngine) -> list[str]:
    """What is not as it should be."""
    mine = f"city-{trajectory.rollout_id.removeprefix('r')}"
    problems: list[str] = []
    roles, tools = roles_of(trajectory), tools_of(trajectory)
    completions = [engine.tokenizer.decode(transition.completion_ids.tolist()) for transition in trajectory.transitions]
    numbers = set(NUMBERED.findall(" ".join(completions)))
    output = trajectory.output if isinstance(trajectory.output, dict) else {}
    if trajectory.outcome != case.outcome:
        problems.append(f"outcome {trajectory.outcome}: {trajectory.error}")
    if "calls" in output and output["calls"] != len(roles):
        problems.append(f"{len(roles)} calls were recorded, the framework counts {output['calls']}")
    if roles != list(case.roles):
        problems.append(f"roles {roles}, not {list(case.roles)}")
    if sorted(tools) != sorted(case.tools):  # some run side by side
        problems.append(f"tools {tools}, not {list(case.tools)}")
    for number, transition in enumerate(trajectory.transitions):
        emission = engine.emissions.get(transition.id)
        prompt = engine.tokenizer.decode(transition.prompt_ids.tolist())
        if emission is None or (
            emission.token_ids != tuple(transition.completion_ids.tolist())
            or emission.request.prompt_ids != tuple(transition.prompt_ids.tolist())
            or emission.logprobs != tuple(transition.logprobs.tolist())
        ):
            problems.append(f"call {number} is not what the engine sampled")
        cities = set(re.findall(r"city-\d+", prompt))
        if cities - {mine} or not (cities or case.example) or set(NUMBERED.findall(prompt)) - numbers:
            problems.append(f"call {number} is another rollout's")
    problems += [
        f"tool {call.name} is another rollout's"
        for call in trajectory.tool_calls
        if set(re.findall(r"city-\d+", call.arguments)) - {mine}
    ]
    return [f"{trajectory.rollout_id}: {problem}" for problem in problems]


def roles_of(trajectory: Trajectory) -> list[str]:
    return [transition.agent or "-" for transition in trajectory.transitions]


def tools_of(trajectory: Trajectory) -> list[str]:
    return [
        f"{call.name} {call.status}{'' if call.transition_id else ' (of no call)'}" for call in trajectory.tool_calls
    ]


def told(trajectory: Trajectory, engine: ScriptedEngine) -> str:
    lines = [f"{trajectory.rollout_id} {trajectory.outcome} {trajectory.error or ''} output {trajectory.output!r}"]
    for transition in trajectory.transitions:
        prompt, text = (
            engine.tokenizer.decode(ids.tolist()) for ids in (transition.prompt_ids, transition.completion_ids)
        )
        lines.append(f"--- call {transition.index} role {transition.agent!r}\n{prompt}\n>>> {text}")
    lines += [
        f"tool {call.name} {call.arguments} {call.status} {call.error_type} "
        f"of {call.transition_id}: {call.result!r:.300}"
        for call in trajectory.tool_calls
    ]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| framework | calls of each rollout | streamed | roles | tools | limits | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = row.trajectories[0] if row.trajectories else None
        roles = ", ".join(dict.fromkeys(roles_of(first))) if first else ""
        tools = ", ".join(tools_of(first)) if first else ""
        calls = " ".join(str(len(one.transitions)) for one in row.trajectories)
        streamed, holds = "yes" if row.case.streams else "no", "NO" if row.problems else "yes"
        cells = (row.case.packages[0].replace("==", " "), calls, streamed, roles, tools, row.case.limits, holds)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run agents of other frameworks and print what was recorded of them.")
    parser.add_argument("only", nargs="*", help="names of agents; none = all")
    parser.add_argument("--show", action="store_true", help="print the first rollout of each, and the worker's log")
    parser.add_argument(
        "--spans", default="", help="append the spans of all rollouts to this file, a line of JSON each"
    )
    arguments = parser.parse_args()
    cases = [case for case in load_cases() if not arguments.only or case.name in arguments.only]
    rows: list[Row] = []
    for case in cases:
        print(f"{case.name} …", file=sys.stderr, flush=True)
        try:
            install(case)
            rows.append(asyncio.run(try_case(case, show=arguments.show, spans=arguments.spans)))
        except subprocess.CalledProcessError as error:
            rows.append(Row(case=case, problems=[f"not installed: {error}"]))
        for problem in rows[-1].problems:
            print(f"  {problem}", file=sys.stderr, flush=True)
    print(table(rows))
    if any(row.problems for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
