"""Measuring, shared by all benchmarks: CPU of work and of processes, a server to measure, another commit beside this
one, the table.

a script prints `RESULT <number>` for each figure ─► against.py: the figure beside its target; then and now, in turns
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightningrl_client.control.client import ServerClient
    from lightningrl_server.launcher import ServerProcess

ROOT: Final = Path(__file__).resolve().parents[1]
RUN_KEY: Final = "benchmark-run-key"
ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment of what is measured: every tree keeps its bytecode, else one compiles at each start what another has
kept."""
AGENT: Final = """
import openai

client = openai.OpenAI(api_key="sk-the-users-own")

def answer(task):
    messages = [{"role": "user", "content": task["question"]}]
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return reply.choices[0].message.content
"""
"""An agent of one call."""
SERVER: Final = ("lightningrl_server", "lightningrl.server")
"""The server's program, by where a tree may have it."""


# ---------------------------------------------------------------------- CPU


def least_cpu_ms(
    work: Callable[[], Any], repeats: int = 15, *, clock: Callable[[], float] = time.process_time
) -> float:
    """Least CPU milliseconds of one call, after one that warms up: what else the machine does only adds to it."""
    return 1e3 * min(_cpu_seconds(work, repeats, 1, clock))


def median_cpu_ms(work: Callable[[], Any], repeats: int = 200) -> float:
    """Median CPU milliseconds of one call on this thread, after ten that warm up."""
    return 1e3 * statistics.median(_cpu_seconds(work, repeats, 10, time.thread_time))


def _cpu_seconds(work: Callable[[], Any], repeats: int, warm_up: int, clock: Callable[[], float]) -> list[float]:
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        began = clock()
        work()
        seconds.append(clock() - began)
    return seconds


def cpu_by_process(pid: int) -> dict[int, float]:
    """CPU seconds of a process and of everything that it started, each with those of its children that have ended."""
    seconds: dict[int, float] = {}
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                seconds |= cpu_by_process(int(child))
    return seconds


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics so far."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()] if path.exists() else []


def watch_steps(
    command: Sequence[str], run: Path, measure: Callable[[int], dict[Any, float]]
) -> dict[int, tuple[float, dict[Any, float]]]:
    """Train, and look from outside at the end of each step: the clock, and what `measure` says of the process.

    Exits with the end of the command's output where it fails, or has fewer than three steps.
    """
    marks: dict[int, tuple[float, dict[Any, float]]] = {}
    run.parent.mkdir(parents=True, exist_ok=True)
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"})
        try:
            while process.poll() is None:
                for line in metrics_of(run):
                    if line["step"] and line["step"] not in marks:
                        marks[line["step"]] = time.monotonic(), measure(process.pid)
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    if process.returncode or len(marks) < 3:
        sys.exit(f"{' '.join(command)}: no whole run\n{log.read_text(errors='replace')[-3000:]}")
    return marks


# ---------------------------------------------------------------------- a server


@asynccontextmanager
async def serving(
    folder: Path, *, reply: Callable[[str], str] | None = None, run_folder: Path | None = None, key: str = RUN_KEY
) -> AsyncIterator[tuple[ServerProcess, ServerClient]]:
    """A server process on an SQLite store in `folder`, served by a scripted engine in this process; and its client.

    `reply` answers a prompt; `run_folder` is what the server's viewer shows, None = it has no viewer.
    """
    from lightningrl_client.control.client import ServerClient
    from lightningrl_server.engines.link import EngineLink
    from lightningrl_server.launcher import ServerProcess
    from lightningrl_server.settings import PolicySettings, ServerSettings
    from lightningrl_testing.scripted_engine import ScriptedEngine
    from lightningrl_testing.tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder / 'store.sqlite'}",
        run_key=key,
        policies={"policy": PolicySettings(model=folder / "policy")},
        folder=run_folder,
    )
    engine = ScriptedEngine(tokenizer, reply=reply, chunk_tokens=64)
    async with (
        ServerProcess(settings) as server,
        EngineLink(engine, server.url, key),
        ServerClient(server.url, key) as client,
    ):
        yield server, client


# ---------------------------------------------------------------------- trees


def lightningrl(*words: str, tree: Path | None = None) -> list[str]:
    """The command `lightningrl …` of this environment, or of a tree's own."""
    program = Path(sys.executable).with_name("lightningrl") if tree is None else tree / ".venv/bin/lightningrl"
    return [str(program), *words]


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The commit's tree beside this one, with the environment that its own `make .venv/.installed` makes.

    A folder that is such a tree already is taken as it is.
    """
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="lightningrl-against-") as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True, capture_output=True
        )
        try:
            print(f"installing {commit} …", flush=True)
            subprocess.run(["make", ".venv/.installed"], cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, capture_output=True
            )


def python_of(tree: Path) -> str:
    return sys.executable if tree == ROOT else str(tree / ".venv/bin/python")


def program_of(python: str, names: Sequence[str]) -> str | None:
    """The first of these modules that the interpreter has."""
    imports = (subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False) for name in names)
    return next((name for name, ran in zip(names, imports, strict=True) if not ran.returncode), None)


@contextmanager
def server_of(tree: Path, settings: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The tree's own server, in its own environment, told its settings as its launcher does: the process and its URL,
    once it answers."""
    python = python_of(tree)
    command = [python, "-m", program_of(python, SERVER) or sys.exit(f"{tree} has no server")]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(settings).encode() + b"\n")
        server.stdin.flush()
        yield server, json.loads(server.stdout.readline())["url"]
        server.stdin.close()


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    unit: str
    target: float | None = None
    at_least: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script of this folder that prints a `RESULT <number>` line for each of its figures."""

    name: str
    command: tuple[str, ...]
    figures: tuple[Figure, ...]
    formerly: tuple[str, ...] = ()
    """The command in commits that have no such script."""
    from_outside: bool = False
    """Start the tree's own programs (`--tree`): this tree's script measures every tree."""
    is_long: bool = False
    """Measured only where it is asked for by name."""


BENCHMARKS: Final = (
    Benchmark(
        name="gateway",
        command=("recorded_calls.py", "--calls", "8000"),
        from_outside=True,
        figures=(Figure(what="gateway CPU per recorded, durable call", target=1.5, unit="ms"),),
    ),
    Benchmark(
        name="in_flight",
        command=("recorded_calls.py", "--held"),
        from_outside=True,
        figures=(Figure(what="calls in flight, none failing", target=1000, unit="calls", at_least=True),),
    ),
    Benchmark(
        name="samples",
        command=("stored.py", "samples"),
        formerly=("trace_to_samples.py",),
        figures=(Figure(what="trace → samples, 50 turns", target=3.0, unit="ms CPU"),),
    ),
    Benchmark(
        name="credit",
        command=("credit_cpu.py",),
        figures=(
            Figure(what="credit of 128 rollouts × 8 turns, the dearest that asks nobody", target=50.0, unit="ms CPU"),
        ),
    ),
    Benchmark(
        name="bytes",
        command=("stored.py", "bytes"),
        figures=(Figure(what="stored bytes, 50 turns", target=80_000, unit="bytes"),),
    ),
    Benchmark(
        name="overhead",
        command=("rollouts.py", "overhead"),
        figures=(Figure(what="one-call rollout beyond the agent's own time", target=0.1, unit="s"),),
    ),
    Benchmark(
        name="life",
        command=("rollouts.py", "life"),
        formerly=("rollout_life.py",),
        figures=(Figure(what="server CPU of a one-call rollout's whole life", target=1.75, unit="ms"),),
    ),
    Benchmark(
        name="sql_life",
        command=("rollouts.py", "life", "--agent", "text_to_sql"),
        formerly=("rollout_life.py", "--agent", "text_to_sql"),
        figures=(Figure(what="server CPU of a text-to-SQL rollout with its spans", target=3.2, unit="ms"),),
    ),
    Benchmark(
        name="import",
        command=("start.py", "import"),
        from_outside=True,
        figures=(
            Figure(what="import lightningrl", target=0.3, unit="s"),
            Figure(what="listing plugins", unit="s"),
            Figure(what="server until it answers", unit="s CPU"),
            Figure(what="check of an agent", unit="s CPU"),
        ),
    ),
    Benchmark(
        name="start",
        command=("start.py", "train"),
        from_outside=True,
        figures=(
            Figure(what="from the command to the agent's first answer", unit="s"),
            Figure(what="CPU from the command to the agent's first answer", unit="s CPU"),
        ),
    ),
    Benchmark(
        name="export",
        command=("start.py", "export"),
        from_outside=True,
        is_long=True,
        figures=(Figure(what="export", unit="s"), Figure(what="CPU of export", unit="s CPU")),
    ),
    Benchmark(
        name="run",
        command=("start.py", "run"),
        from_outside=True,
        is_long=True,
        figures=(
            Figure(what="text-to-SQL, 10 steps, two validations", unit="s"),
            Figure(what="CPU of it", unit="s CPU"),
            Figure(what="its median step", unit="s"),
        ),
    ),
)


def result(*numbers: float) -> None:
    """Print a figure for the table, a line each; NaN = there is nothing of the kind."""
    for number in numbers:
        print(f"RESULT {number:.5g}", flush=True)


def fill_page(page: Path, tables: Mapping[str, str]) -> None:
    """Print tables, and put each between its marks in a page, `<!-- NAME: made by … -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for name, table in tables.items():
        print(f"\n{table}")
        begin, mark, rest = text.partition(f"<!-- {name}: ")
        if mark:
            told, _, rest = rest.partition("-->\n")
            text = f"{begin}{mark}{told}-->\n\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    if text:
        page.write_text(text, encoding="utf-8")


def measure(tree: Path, benchmark: Benchmark) -> list[float] | str:
    """A tree's figures of a benchmark, in its own environment; all that the script printed where it failed.

    The script is the tree's own, under its former name in older trees, and this tree's where it has none.
    """
    here = Path(__file__).resolve().parent
    if benchmark.from_outside:
        words = [sys.executable, str(here / benchmark.command[0]), *benchmark.command[1:], "--tree", str(tree)]
    else:
        commands = [command for command in (benchmark.command, benchmark.formerly) if command]
        folders = [tree / "benchmarks"] * len(commands) + [here]
        script, *options = next(
            (str(folder / name), *rest)
            for folder, (name, *rest) in zip(folders, [*commands, benchmark.command], strict=True)
            if (folder / name).exists()
        )
        words = [python_of(tree), script, *options]
    environment = ENVIRONMENT if benchmark.from_outside else {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tree, env=environment)
    numbers = [float(number) for number in re.findall(r"^RESULT ([-+.\deE]+|nan)", ran.stdout, re.MULTILINE)]
    return ran.stdout + ran.stderr if ran.returncode or len(numbers) != len(benchmark.figures) else numbers
