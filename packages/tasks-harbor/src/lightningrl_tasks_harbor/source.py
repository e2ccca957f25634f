"""Task folders in Harbor's format as a source of tasks: their rewards, their agent, and gold.

tasks = { use = "harbor", options = { folder = "tasks" }, train = { seed = 1 }, validation = { seed = 2 } }
agent = "tasks"
rewards.tests.use = "tasks"
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from lightningrl.errors import ConfigError, RewardError
from lightningrl.types import Task, Trajectory
from lightningrl_tasks_harbor.agent import AgentSettings, converse
from lightningrl_tasks_harbor.opening import BoxSettings, check_box, open_box
from lightningrl_tasks_harbor.task_folder import is_task_folder, read_task_folder
from lightningrl_tasks_harbor.verifier import choose_reward, solve, verify

__all__ = ["HarborTasks"]

SPLITS: Final = ("train", "validation")


class HarborTasks:
    """Tasks of a folder of task folders. A box is opened for each rollout, and by `gold`."""

    requires: frozenset[str] = frozenset()

    def __init__(
        self,
        folder: str | Path,
        *,
        box: Literal["auto", "container", "unshare"] = "auto",
        trusted: bool | None = None,
        network: bool = False,
        host_folders: Sequence[str] = (),
        storage_mb: int = 512,
        validation_share: float = 0.2,
        reward: str | None = None,
        max_turns: int = 12,
        max_output: int = 4_000,
        command_timeout_s: float = 30.0,
        time_limit_s: float = 300.0,
        recipe_folder: str | Path = ".",
    ) -> None:
        """`folder`, seen from the recipe's, has task folders, or `train` and `validation` with task folders in them;
        without these a task's name says by `validation_share` to which split it belongs. `reward`: which number of a
        `reward.json` counts. `max_turns`, `max_output` (bytes), `command_timeout_s` and `time_limit_s` (of all
        commands) bound the agent.
        Raises ConfigError where there is no such folder, or a setting is none."""
        self._folder = Path(recipe_folder, Path(folder).expanduser()).resolve()
        if not self._folder.is_dir():
            raise ConfigError(f"options.folder: no folder {str(self._folder)!r}; name one with task folders in it")
        if box not in ("auto", "container", "unshare"):
            raise ConfigError(f"options.box: {box!r} is none of 'auto', 'container', 'unshare'; take one of them")
        if not 0 <= validation_share <= 1:
            raise ConfigError(f"options.validation_share: {validation_share!r} is no share; take a number from 0 to 1")
        numbers = {
            "storage_mb": storage_mb,
            "max_turns": max_turns,
            "max_output": max_output,
            "command_timeout_s": command_timeout_s,
            "time_limit_s": time_limit_s,
        }
        for name, number in numbers.items():
            if number <= 0:
                raise ConfigError(f"options.{name}: {number!r} is not above 0; give a larger number")
        for path in host_folders:
            if not Path(path).is_absolute() or not Path(path).exists():
                raise ConfigError(f"options.host_folders: no {path!r}; write absolute paths of this machine")
        self._boxes = BoxSettings(
            box=box, trusted=trusted, network=network, storage_mb=storage_mb, host_folders=tuple(host_folders)
        )
        self._agent = AgentSettings(
            max_turns=max_turns,
            max_output=max_output,
            command_timeout_s=command_timeout_s,
            time_limit_s=time_limit_s,
        )
        self._share = validation_share
        self._reward = reward

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """Yield the tasks of a split in the order of a seed, at most `count`. Raises ConfigError at a task that cannot
        be run."""
        paths = self._paths(split)
        ordered = sorted(paths, key=lambda path: hashlib.sha256(f"{seed}/{path.name}".encode()).digest())
        for path in ordered[:count]:
            task = read_task_folder(path)
            check_box(task, self._boxes)
            yield Task(
                id=path.name,
                input={"instruction": task.instruction, "folder": path.relative_to(self._folder).as_posix()},
                metadata={"name": task.name, **task.metadata},
            )

    def agent(self, task_input: Mapping[str, Any]) -> dict[str, Any]:
        """Work on a task in a box of its own, then run its tests there; the output holds their verdict."""
        task = read_task_folder(self._folder / task_input["folder"])
        with open_box(task, self._boxes) as opened:
            limit_s = task.agent_timeout_s or self._agent.time_limit_s
            conversation = converse(task_input["instruction"], opened, self._agent, limit_s)
            return {**conversation, "box": opened.box.kind, "verdict": verify(task, opened).as_json()}

    def reward(self, task: Task, output: Any, trajectory: Trajectory | None = None, /) -> float:
        """The reward that the tests wrote in the rollout's box; 0 where they wrote none. Raises RewardError for an
        output without their verdict: of another agent than this source's."""
        verdict = output.get("verdict") if isinstance(output, Mapping) else None
        if not isinstance(verdict, Mapping):
            raise RewardError(
                'the output has no verdict of tests/test.sh; take agent = "tasks", which runs them in its box'
            )
        return choose_reward(verdict["rewards"], self._reward) if verdict["rewards"] else 0.0

    def gold(self, task: Task) -> dict[str, Any] | None:
        """Run the task's own solution in a box, and its tests; None where it has none."""
        folder = read_task_folder(self._folder / task.input["folder"])
        if not folder.has_solution:
            return None
        with open_box(folder, self._boxes) as opened:
            printed = solve(folder, opened, folder.agent_timeout_s or self._agent.time_limit_s)
            verdict = verify(folder, opened)
            return {
                "answer": printed[-200:],
                "turns": 0,
                "ended": "answer",
                "box": opened.box.kind,
                "verdict": verdict.as_json(),
            }

    def _paths(self, split: str) -> list[Path]:
        named = self._folder / split
        if named.is_dir() and not is_task_folder(named):
            paths = _list_tasks(named)
        elif split not in SPLITS:
            raise ConfigError(
                f"{self._folder} has no folder {split!r}; a split is 'train', 'validation', or a folder of it"
            )
        else:
            is_held_out = split == "validation"
            paths = [path for path in _list_tasks(self._folder) if (_share_of(path.name) < self._share) == is_held_out]
        if not paths:
            raise ConfigError(f"{self._folder} has no task for {split!r}; a task is a folder with a task.toml")
        return paths


def _list_tasks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_task_folder(path))


def _share_of(name: str) -> float:
    """A number from 0 to 1 that the name alone decides: a task stays in its split when others come."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
