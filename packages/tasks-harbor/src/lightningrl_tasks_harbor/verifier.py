"""Scores a box as Harbor's verifier does: `tests/test.sh` runs in a fresh one, where what the agent left in its folder
is put; what it writes to /logs/verifier counts."""

from __future__ import annotations

import io
import json
import math
import posixpath
import re
import tarfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from lightningrl.errors import ConfigError, RewardError
from lightningrl_tasks_harbor.boxes import Box, BoxError, BoxGone, pack
from lightningrl_tasks_harbor.opening import OpenBox, open_box
from lightningrl_tasks_harbor.task_folder import TaskFolder

__all__ = ["Verdict", "choose_reward", "solve", "verify"]

LOGS: Final = ("agent", "artifacts", "verifier")
SHARED: Final = re.compile(r"/(bin|dev|etc|home|lib\w*|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)")
"""Folders at the root that hold more than a task's work."""
FAST_S: Final = 30.0
LONGEST_REWARD: Final = 65_536
LONGEST_REPORT: Final = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a task's tests in one box."""

    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name, as `reward.json` has them; `{"reward": x}` for a `reward.txt`. Empty = the tests wrote none."""
    problem: str = ""
    """Why there is no reward."""
    report: str = ""
    """The ends of what the tests printed."""

    def as_json(self) -> dict[str, Any]:
        """The form in which it stands in a rollout's output."""
        return {"rewards": dict(self.rewards), "problem": self.problem, "report": self.report}


def verify(task: TaskFolder, opened: OpenBox) -> Verdict:
    """Run `tests/test.sh` in a fresh box with the files of one whose agent has ended.

    They are the working folder and the task's artifacts: programs, libraries and settings that the tests use are not
    those that the agent may have replaced. Raises BoxGone where a box ended, or the fresh one does not open."""
    with ExitStack() as stack:
        try:
            fresh = stack.enter_context(open_box(task, opened.settings))
        except BoxError as error:
            raise BoxGone(f"the box for the tests was not opened: {error}") from error
        return _run_tests(task, opened, fresh)


def _run_tests(task: TaskFolder, opened: OpenBox, fresh: OpenBox) -> Verdict:
    box = fresh.box
    try:
        opened.box.stop_processes()
        folder = fresh.folder or box.run("pwd", folder="", environment={}, timeout_s=FAST_S).output.strip()
        for path in (_root_of_work(task, folder), *task.artifacts):
            _carry(opened.box, box, path)
        box.put(pack(()), "/logs", afresh=True)
        for name in LOGS:
            box.put(pack(()), f"/logs/{name}")
        box.put(pack([(path, path.name) for path in sorted((task.path / "tests").iterdir())]), "/tests", afresh=True)
        ended = box.run(
            "/tests/test.sh",
            folder=fresh.folder,
            environment={**fresh.environment, **task.verifier_environment},
            timeout_s=task.verifier_timeout_s,
            limit=LONGEST_REPORT,
        )
        box.stop_processes()
        texts = {name: box.read(f"/logs/verifier/{name}", LONGEST_REWARD) for name in ("reward.json", "reward.txt")}
    except BoxGone:
        raise
    except BoxError as error:  # more files than the fresh box holds: the agent's own doing
        return Verdict(problem=str(error))
    report = ended.output.strip()
    if ended.is_late:
        return Verdict(problem=f"tests/test.sh ran longer than {task.verifier_timeout_s:g} s", report=report)
    rewards, problem = _read_rewards(texts["reward.json"], texts["reward.txt"], ended.status)
    return Verdict(rewards=rewards, problem=problem, report=report)


def _root_of_work(task: TaskFolder, folder: str) -> str:
    """The tree that the agent works in: `/app` of `/app/sub`, but `/home/me` of `/home/me`. Raises ConfigError."""
    first = f"/{folder.split('/')[1]}"
    if first == "/":
        raise ConfigError(f"task {task.path}: it works in '/', and its tests see its folder alone; give it a WORKDIR")
    return folder if SHARED.fullmatch(first) else first


def _carry(old: Box, fresh: Box, path: str) -> None:
    """Put what the agent left at a path into the fresh box, in the place of what is there."""
    files = old.take(path)
    if files is not None:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            is_folder = (first := archive.next()) is not None and first.isdir()
    if files is None or is_folder:
        fresh.put(pack(()), path, afresh=True)
    if files is not None:
        fresh.put(files, posixpath.dirname(path))


def solve(task: TaskFolder, opened: OpenBox, timeout_s: float) -> str:
    """Run `solution/solve.sh` in the box and return the end of what it printed."""
    files = pack([(path, path.name) for path in sorted((task.path / "solution").iterdir())])
    opened.box.put(files, "/solution", afresh=True)
    environment = {**opened.environment, **task.solution_environment}
    ended = opened.box.run(
        "/solution/solve.sh", folder=opened.folder, environment=environment, timeout_s=timeout_s, limit=LONGEST_REPORT
    )
    return ended.output


def choose_reward(rewards: Mapping[str, float], name: str | None) -> float:
    """The reward of that name; without a name `reward`, or the only one. Raises RewardError where none is meant."""
    if name is None and len(rewards) == 1:
        return next(iter(rewards.values()))
    chosen = name or "reward"
    if chosen in rewards:
        return rewards[chosen]
    raise RewardError(
        f"reward.json has {', '.join(map(repr, rewards))} and no {chosen!r}; choose one with options.reward"
    )


def _read_rewards(written: bytes | None, plain: bytes | None, status: int) -> tuple[dict[str, float], str]:
    """Read `reward.json`, else `reward.txt`, with Harbor's rules: finite numbers alone."""
    try:
        if written is not None:
            values = json.loads(written)
            if not isinstance(values, dict) or not values:
                return {}, "reward.json holds no object of numbers"
            if not all(isinstance(value, (int, float)) for value in values.values()):
                return {}, "reward.json holds something that is no number"
            rewards = {str(name): float(value) for name, value in values.items()}
        elif plain is not None:
            rewards = {"reward": float(plain)}
        else:
            return {}, f"tests/test.sh ended with status {status} and wrote no reward"
    except (ValueError, RecursionError, OverflowError):
        return {}, f"{'reward.txt' if written is None else 'reward.json'} cannot be read"
    if not all(math.isfinite(value) for value in rewards.values()):
        return {}, "a reward is no finite number"
    return rewards, ""
