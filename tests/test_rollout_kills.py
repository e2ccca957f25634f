"""kill -9 in mid-rollout: of a harness, of the process of a task source, of a worker, of `lightningrl work`. Nothing is
lost, and no folder and no process is left.

    pytest --long tests/test_rollout_kills.py      fifty kills, in minutes; of mini-swe-agent and pi, too, where
                                                   `make test-peers-clients ONLY="mini_swe_agent pi"` has installed them
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from harbor_folders import write_task
from processes import ancestors, commands, descendants, processes_that_name
from sizes import sized
from small_harness import ROW

from lightningrl.keys import worker_key
from lightningrl.types import Outcome, RolloutSpec, SamplingSettings, Task, Trajectory
from lightningrl_tasks_verifiers import VerifiersTasks
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import RUN_KEY, WholePath, running_services

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="it looks for processes in /proc")

ROOT: Final = Path(__file__).resolve().parents[1]
KILLS: Final = sized(8, 50)
WORK_KILLS: Final = sized(0, 4)
"""Kills of `lightningrl work`, among them: after each a lease of 30 s has to end."""
SCENE_S: Final = 300.0
"""A kill whose rollout has not ended by then has failed."""
PROGRAMS: Final = sized({}, {"mini-swe-agent": "mini_swe_agent/bin", "pi": "pi/node_modules/.bin"})
"""Real harnesses, and where their programs are below .clients."""
HANG: Final = """\
test -e "$1" && exit 0
setsid sleep 100000 &
echo $$ $! > "$1.new"
mv "$1.new" "$1"
sleep 100000
"""
"""Of a harness's shell: it hangs the first time, with a process in a session of its own."""
DONE: Final = "It is done."


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A process that is killed, and how its rollout ends."""

    name: str
    place: int
    """0 = the process that hangs, 1 = its parent, …; -1 = the child of this test, which is the worker or its command."""
    sentence: str
    """Pattern of the error of the attempt."""
    outcome: Outcome = Outcome.INFRASTRUCTURE_ERROR
    """Outcome of the attempt; this one is tried again, any other is the rollout's."""


WORKER: Final = "the worker process died with SIGKILL"
OPENENV: Final = (
    Victim(name="server of openenv", place=0, sentence="EnvironmentFailure"),
    Victim(name="guard of that server", place=1, sentence="EnvironmentFailure"),
    Victim(name="worker of openenv", place=-1, sentence=WORKER),
)
HARBOR: Final = (
    Victim(name="box of harbor", place=-2, sentence="the box by unshare ended"),
    Victim(name="worker of harbor", place=-1, sentence=WORKER),
)
VERIFIERS: Final = "process of verifiers"
WORK: Final = Victim(name="lightningrl work", place=-1, sentence="lease expired")


class Policy:
    """Asks for what stands between « and » in the task by the shell's tool that is offered, then says that it is done;
    answers the sums of OpenEnv's server wrong; has verifiers' process hang."""

    def __init__(self) -> None:
        self._asked = set[str]()

    def __call__(self, prompt: str) -> str:
        if "What is" in prompt:
            return call("answer", text="1")
        if "«" not in prompt:
            return "hang once"
        command, _, since = prompt.rpartition("«")[2].partition("»")
        tool = re.findall(r'"name": "(run|bash)"', prompt)[0]
        # in a box no file says that a command was run before
        if "<tool_response>" in since or (command.startswith("sleep") and command in self._asked):
            last = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
            return call(tool, command=f"echo {last}") if last in prompt else DONE
        self._asked.add(command)
        return call(tool, command=command)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Killing:
    """Kills on one server, one after the other."""

    def __init__(self, path: WholePath, folder: Path, rooms: Path) -> None:
        self.path = path
        self.folder = folder
        self.rooms = rooms
        self.counts: Counter[str] = Counter()

    async def kill(self, victim: Victim, task: Task, hanging: Callable[[], Sequence[int]]) -> None:
        """Run a rollout in whose first attempt the victim is killed, once there are `hanging` processes."""
        name = f"r{self.counts.total()}"
        async with self.bounded(victim.name, name):
            pids = await self.begin(name, task, hanging)
            recorded = (await self.path.client.rollout(name)).attempts[0].calls
            doomed = descendants(ancestors(pids[0])[victim.place])
            assert {process.pid for process in doomed} >= set(pids)
            os.kill(ancestors(pids[0])[victim.place], signal.SIGKILL)
            await self.until(lambda: not [process for process in doomed if process.is_alive], str(doomed))
            await self.check(victim, name, recorded)
            await self.until(lambda: not list(self.rooms.glob("*/*")), "folders of a rollout are left")
        self.counts[victim.name] += 1

    async def begin(self, name: str, task: Task, hanging: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Processes of the rollout, which hangs."""
        roomy = SamplingSettings(max_tokens=2048)  # a character is a token, and commands have long paths
        await self.path.client.create_rollouts(
            [RolloutSpec(id=name, task=task, group_id="g", max_attempts=3, sampling=roomy)]
        )
        while not (pids := hanging()):
            assert not await self.path.client.wait([name], 0.0), await self.path.client.rollout(name)
            await asyncio.sleep(0.02)
        return pids

    async def check(self, victim: Victim, name: str, recorded: int) -> None:
        """The rollout's end: tried again or failed, with a sentence, and every call of the killed attempt is there."""
        while not await self.path.client.wait([name], 10.0):
            pass
        first, *others = (await self.path.client.rollout(name)).attempts
        assert first.calls == recorded > 0
        assert first.outcome is victim.outcome and re.search(victim.sentence, first.error or ""), first
        is_again = victim.outcome is Outcome.INFRASTRUCTURE_ERROR
        assert [attempt.outcome for attempt in others] == [Outcome.SUCCEEDED] * is_again, others
        (trajectory,) = await self.path.client.trajectories([name])
        assert trajectory.attempt == 1 + is_again
        assert len(trajectory.transitions) == (others[0].calls if others else recorded)

    @contextlib.asynccontextmanager
    async def bounded(self, what: str, name: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(SCENE_S):
                yield
        except TimeoutError:
            record = await self.path.client.rollout(name)
            logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
            raise AssertionError(f"kill of the {what}: no end after {SCENE_S:g} s\n{record!r}\n{logs}") from None

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(SCENE_S / 3):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"waited {SCENE_S / 3:g} s: {what}") from None

    # ------------------------------------------------------------------ what is killed

    async def harnesses(self, kills: Mapping[Victim, int], agent: Mapping[str, Any]) -> None:
        async with self.path.workers(agent, base_dir=self.folder):
            for victim in in_turns(kills):
                await self.kill(victim, *self.hanging_shell())

    def hanging_shell(self) -> tuple[Task, Callable[[], Sequence[int]]]:
        """A task whose command hangs, and the processes of it once it does."""
        file = self.folder / f"pids-{self.counts.total()}"
        task = Task(id=file.name, input=f"do «sh {self.folder / 'hang.sh'} {file}»")
        return task, lambda: read_pids(file)

    async def work(self, kills: int, recipe: Path) -> None:
        """`lightningrl work` itself is killed; another goes on."""
        for _ in range(kills):
            first = self.start_work(recipe)
            try:
                task, hanging = self.hanging_shell()
                killing = asyncio.create_task(self.kill(WORK, task, hanging))
                ending = asyncio.create_task(asyncio.to_thread(first.wait))
                await asyncio.wait({killing, ending}, return_when=asyncio.FIRST_COMPLETED)
                second = self.start_work(recipe)
                try:
                    await killing
                finally:
                    second.terminate()
                    await asyncio.to_thread(second.wait, SCENE_S)
            finally:
                first.kill()

    def start_work(self, recipe: Path) -> subprocess.Popen[bytes]:
        words = ["work", str(recipe), "--server", self.path.url, "--workers", "1"]
        with (self.folder / "work.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lightningrl", *words],
                env={**os.environ, "LIGHTNINGRL_KEY": worker_key(RUN_KEY)},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    async def openenv(self, kills: Mapping[Victim, int]) -> None:
        marks = self.folder / "openenv"
        marks.mkdir()
        server = ROOT / "packages" / "tasks-openenv" / "tests" / "hanging_server.py"
        command = shlex.join([sys.executable, str(server), str(marks), "{port}"])
        async with self.path.workers(source_agent("openenv", command=command), base_dir=self.folder):
            for number, victim in enumerate(in_turns(kills)):
                task = Task(id=f"train-{number}", input={})
                await self.kill(victim, task, partial(read_pids, marks / task.id))

    async def harbor(self, kills: Mapping[Victim, int]) -> None:
        write_task(
            self.folder / "tasks", "one", instruction="", solve="true", test="echo 1 > /logs/verifier/reward.txt"
        )
        options = {
            "folder": str(self.folder / "tasks"),
            "box": "unshare",
            "trusted": True,
            "command_timeout_s": SCENE_S,
        }
        async with self.path.workers(source_agent("harbor", **options), base_dir=self.folder):
            for number, victim in enumerate(in_turns(kills)):
                command = f"sleep {100_000 + number}.{os.getpid()}"
                task = Task(id="one", input={"instruction": f"do «{command}»", "folder": "one"})
                await self.kill(victim, task, partial(commands, command))

    async def verifiers(self, kills: int) -> None:
        """Its process is the trainer's, and killed while it scores."""
        options = {"python": str(self.folder / "python"), "taskset": "any"}
        async with self.path.workers(source_agent("verifiers", **options), base_dir=self.folder):
            for number in range(kills):
                place = self.folder / f"verifiers-{number}"
                place.mkdir()
                source = VerifiersTasks(python=write_interpreter(place), taskset="any", timeout_s=SCENE_S)
                with contextlib.closing(source):
                    (task,) = source.tasks("train", seed=number, count=1)
                    (trajectory,) = await self.path.run_tasks({f"v{number}": task}, wait_s=SCENE_S)
                    await self.kill_scoring(source, trajectory, place / "hangs")

    async def kill_scoring(self, source: VerifiersTasks, trajectory: Trajectory, hangs: Path) -> None:
        async with self.bounded(VERIFIERS, trajectory.rollout_id):
            scoring = asyncio.create_task(source.reward(trajectory.task, trajectory.output, trajectory))
            await self.until(lambda: len(read_pids(hangs)) == 2 or scoring.done(), "it does not score")
            doomed = {process for pid in read_pids(hangs) for process in descendants(pid)}
            os.kill(read_pids(hangs)[0], signal.SIGKILL)
            assert await scoring == 0.0
            await self.until(lambda: not [process for process in doomed if process.is_alive], str(doomed))
        self.counts[VERIFIERS] += 1


def source_agent(name: str, **options: Any) -> str:
    """The agent of a recipe with `agent = "tasks"`, as its workers are told of it."""
    return f"tasks:{json.dumps({'': {'use': name, 'options': options}})}"


def write_interpreter(folder: Path) -> str:
    """An interpreter with verifiers, as far as the source knows."""
    server, program = ROOT / "packages" / "tasks-verifiers" / "tests" / "line_server.py", folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{server}" "{folder}"\n')
    program.chmod(0o755)
    return str(program)


def read_pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def in_turns(kills: Mapping[Victim, int]) -> list[Victim]:
    """Each victim as often as it is to be killed, one after the other."""
    return [victim for turn in range(max(kills.values())) for victim, count in kills.items() if turn < count]


def deal(kills: int, names: Sequence[Any]) -> dict[Any, int]:
    """How often each of them is killed."""
    return {name: kills // len(names) + (place < kills % len(names)) for place, name in enumerate(names)}


def installed_harnesses() -> dict[str, Mapping[str, Any]]:
    """Real ones, as a recipe's agent."""
    folders = {name: ROOT / ".clients" / place for name, place in PROGRAMS.items()}
    return {
        name: {"harness": name, "environment": {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}}
        for name, folder in folders.items()
        if folder.is_dir()
    }


def harness_victims(name: str) -> tuple[Victim, Victim]:
    return (
        Victim(name=name, place=-2, sentence="ended with status -9", outcome=Outcome.AGENT_ERROR),
        Victim(name=f"worker of {name}", place=-1, sentence=WORKER),
    )


def write_recipe(folder: Path) -> Path:
    """A recipe of the small harness, for `lightningrl work`."""
    (folder / "parts.py").touch()
    lines = [
        f"agent = {{ harness = {{ command = {json.dumps(ROW['command'])} }} }}",
        'tasks.train = "parts.py:tasks"',
        'rewards.score.use = "parts.py:score"',
        'policy.model = "policy"',
    ]
    (folder / "recipe.toml").write_text("\n".join(lines))
    return folder / "recipe.toml"


@pytest.mark.slow
async def test_kills_in_mid_rollout_lose_nothing_and_leave_no_folder_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    rooms = tmp_path / "tmp"
    rooms.mkdir()
    monkeypatch.setenv("TMPDIR", str(rooms))
    (tmp_path / "hang.sh").write_text(HANG)
    agents: dict[str, Mapping[str, Any]] = {"harness": {"harness": ROW}, **installed_harnesses()}
    harnesses = {name: harness_victims(name) for name in agents}
    shares = deal(KILLS - WORK_KILLS, [*chain(*harnesses.values()), *OPENENV, *HARBOR, VERIFIERS])
    try:
        engine = ScriptedEngine(tiny_tokenizer(), reply=Policy(), chunk_tokens=32)
        async with running_services(tmp_path, engine=engine) as path:
            killing = Killing(path, tmp_path, rooms)
            for name, agent in agents.items():
                await killing.harnesses({victim: shares[victim] for victim in harnesses[name]}, agent)
            await killing.openenv({victim: shares[victim] for victim in OPENENV})
            await killing.harbor({victim: shares[victim] for victim in HARBOR})
            await killing.verifiers(shares[VERIFIERS])
            await killing.work(WORK_KILLS, write_recipe(tmp_path))
            await killing.until(lambda: not list(rooms.iterdir()), "folders are left")
        await killing.until(lambda: not processes_that_name(tmp_path), "processes are left")
    finally:
        for process in processes_that_name(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    assert killing.counts.total() == KILLS
    figures = ", ".join(f"{count} {name}" for name, count in killing.counts.items())
    record_property("figure", f"{KILLS} kills in mid-rollout, nothing lost, nothing left: {figures}")
