"""A coding harness as the agent: `agent = { harness = "pi", template = "project", check = "pytest -q" }`.

task ─► room: template | git revision, + metadata.files ─► the harness ─► + metadata.check_files, the check ─► output
        (a task's metadata counts as far as `from_task` names it)
output   {"text": the end of stdout, "diff": what changed, "check": {"status", "passed", "failed", "said"} or None}
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError
from lightningrl.keys import Mask
from lightningrl.types import Task
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_client.runtime.command import CommandFailed, describe_end
from lightningrl_client.runtime.environment import gateway_environment
from lightningrl_client.runtime.harnesses.folder import FolderError, Rollouts, Room, git, in_thread, write_files
from lightningrl_client.runtime.harnesses.program import (
    ProgramOutput,
    boxed_command,
    opened_gate,
    require_boxes,
    run_check,
    run_program,
)
from lightningrl_client.runtime.harnesses.rows import Places, find_harness, refuse_unknown, text_of

__all__ = ["HarnessAgent", "harness_reference", "load_harness"]

logger = logging.getLogger(__name__)

PREFIX: Final = "harness:"
LONGEST_TEXT: Final = 20_000
"""Characters of stdout in the output: its end."""
OF_TASK: Final = ("files", "revision", "check", "check_files")
"""Names in a task's metadata that a recipe may let count."""
LEFT_OUT: Final = ("AIDER_", "CLAUDE", "CODEX_", "LLM_", "MSWEA_", "OPENCODE", "OPENHANDS_", "OTEL_", "QWEN_", "XDG_")
"""Beginnings of variables that no harness gets from the worker's environment: settings of the user's own."""
PYTHON: Final = frozenset({"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"})
"""Variables of the worker's Python, which would break another's."""


class HarnessAgent:
    """Runs a harness once for each rollout, in folders of its own."""

    def __init__(
        self,
        harness: str | Mapping[str, Any],
        *,
        model: str | None = None,
        environment: Mapping[str, str] | None = None,
        template: str | None = None,
        repository: str = ".",
        revision: str | None = None,
        check: str | None = None,
        check_seconds: float = 60.0,
        disk_mb: float = 1024.0,
        network: str = "open",
        from_task: Sequence[str] = (),
        base_dir: Path | str = ".",
    ) -> None:
        """Make the agent. Raises ConfigError.

        harness          a name of the table, or a row as its are: `{ command = ["my-agent", "{input}"] }`
        model            name that it is given for the policy; None = the row's
        environment      added to the row's
        template         folder whose files each rollout starts with; paths are relative to the recipe
        repository, revision   the same of a git revision, without its history
        check            a shell's command in the folder, once the harness has ended
        check_seconds    that it may take
        disk_mb          MiB that a rollout's folders may hold
        network          "open", or "gateway": the harness reaches nothing else, and its check nothing (Linux)
        from_task        what a task's metadata may say: "files", "revision", "check", "check_files". A command in a row
                         of a data set runs with your rights: name it where the rows are your own
        """
        self.row = find_harness(harness)
        if model is not None:
            self.row = replace(self.row, model=model)
        self.environment = dict(environment or {})
        self.template = None if template is None else _folder("template", base_dir, template)
        self.repository = _folder("repository", base_dir, repository)
        self.revision = revision
        self.check = check
        for name, value in (("check_seconds", check_seconds), ("disk_mb", disk_mb)):
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"agent.{name} is {value!r}; give a number above 0")
        if network not in ("open", "gateway"):
            raise ConfigError(f"agent.network is {network!r}; write 'open' or 'gateway'")
        if isinstance(from_task, str) or set(from_task).difference(OF_TASK):
            raise ConfigError(f"agent.from_task is {from_task!r}; give a list of {', '.join(map(repr, OF_TASK))}")
        self.from_task = frozenset(from_task)
        self.is_boxed = network == "gateway"
        self.check_seconds = check_seconds
        self.most_bytes = int(disk_mb * 2**20)
        self._rollouts = Rollouts()

    def require(self) -> None:
        """Raise ConfigError where a program, or the revision, is not on this machine."""
        program = self.row.command[0]
        if shutil.which(program, path=(self.environment or {}).get("PATH")) is None:
            remedy = f"install it: {self.row.install}" if self.row.install else "install it, or give its path"
            raise ConfigError(f"harness {self.row.name!r}: no program {program!r}; {remedy}")
        if shutil.which("git") is None:
            raise ConfigError(f"harness {self.row.name!r}: no program 'git', which keeps its folders; install git")
        if self.is_boxed:
            require_boxes()
        if self.revision is not None:
            try:
                commit = f"{self.revision}^{{commit}}"
                git("-C", self.repository, "rev-parse", "--verify", "--quiet", "--end-of-options", commit)
            except FolderError as error:
                where = f"{self.revision!r} in {str(self.repository)!r}"
                raise ConfigError(f"agent.revision: no git revision {where}; name a commit, tag or branch") from error

    async def __call__(self, task_input: Any, task: Task | None = None) -> dict[str, Any]:
        """The output of one rollout. Raises CommandFailed where the harness ends with a status other than 0."""
        metadata = self._read_metadata(task)
        async with self._rollouts.room() as room, contextlib.AsyncExitStack() as stack:
            files = _files(metadata, "files")
            revision = metadata.get("revision") or self.revision
            await in_thread(room.furnish, self.template, self.repository, revision, files, self.row.exclude)
            url, given, key = _attempt_variables()
            port = 0
            if self.is_boxed and given:
                port, given = await stack.enter_async_context(opened_gate(url, room, given))
            places = Places(
                input=text_of(task_input),
                base_url=given.get("OPENAI_BASE_URL", ""),
                key=key,
                model=self.row.model,
                home=str(room.home),
                folder=str(room.work),
            )
            ended = await self._run_harness(places, room, given, port)
            mask = Mask([key])
            sys.stderr.write(mask.text(ended.errors))
            if ended.status != 0:
                raise CommandFailed(describe_end(self.row.name, ended.status, ended.output, ended.errors))
            diff = await in_thread(room.diff, boxed_command((), room, 0) if self.is_boxed else ())
            result = await self._run_check(metadata, room)
            return {"text": mask.text(ended.output[-LONGEST_TEXT:]), "diff": mask.text(diff), "check": result}

    def _read_metadata(self, task: Task | None) -> dict[str, Any]:
        """Read what the recipe lets the task's metadata say; the rest is data."""
        metadata = {} if task is None else task.metadata
        if unread := [name for name in OF_TASK if name in metadata and name not in self.from_task]:
            _say_unread(json.dumps(unread))
        return {name: value for name, value in metadata.items() if name in self.from_task}

    async def _run_harness(self, places: Places, room: Room, given: Mapping[str, str], port: int) -> ProgramOutput:
        variables = {**_own_variables(room), **given}
        for name, text in {**self.row.environment, **self.environment}.items():
            variables[name] = places.fill(text)
        write_files(room.home, {name: places.fill(text) for name, text in self.row.files.items()})
        command = [places.argument(word) for word in self.row.command]
        if self.is_boxed:
            command = boxed_command(command, room, port)
        stdin = places.fill(self.row.stdin)
        return await run_program(command, room, variables, most_bytes=self.most_bytes, stdin=stdin)

    async def _run_check(self, metadata: Mapping[str, Any], room: Room) -> dict[str, Any] | None:
        """The check's result; None where there is none. It has no key, and calls no model."""
        command = metadata.get("check") or self.check
        if command is None:
            return None
        await in_thread(room.renew_home)
        await in_thread(write_files, room.work, _files(metadata, "check_files"))
        variables = {**_own_variables(room, of_check=True), **self.environment}
        words: list[str] = ["/bin/sh", "-c", str(command)]
        words = boxed_command(words, room, 0) if self.is_boxed else words
        return await run_check(words, room, variables, seconds=self.check_seconds, most_bytes=self.most_bytes)


@lru_cache(maxsize=8)
def _say_unread(names: str) -> None:
    logger.warning(
        "metadata of tasks has %s, which the harness does not use: a column of a data set is data; where the rows are "
        "your own, write agent.from_task = %s",
        *(names, names),
    )


def harness_reference(table: Mapping[str, Any]) -> str:
    """The text by which a worker makes the same agent of a recipe's `agent` table. Raises ConfigError."""
    taken = [name for name in inspect.signature(HarnessAgent).parameters if name != "base_dir"]
    if "harness" not in table:
        raise ConfigError(
            f'agent is a table without a harness; write agent = {{ harness = "pi" }}, got {dict(table)!r}'
        )
    refuse_unknown("agent", table, taken)
    find_harness(table["harness"])
    return PREFIX + json.dumps(table)


def load_harness(text: str, folder: Path) -> HarnessAgent:
    """The agent that `harness_reference` wrote of. Raises ConfigError, also where a program is not installed."""
    agent = HarnessAgent(**json.loads(text.removeprefix(PREFIX)), base_dir=folder)
    agent.require()
    return agent


def _folder(name: str, base_dir: Path | str, given: str) -> Path:
    folder = (Path(base_dir) / given).resolve()
    if not folder.is_dir():
        raise ConfigError(f"agent.{name}: no folder {str(folder)!r}; paths are relative to the recipe")
    return folder


def _files(metadata: Mapping[str, Any], name: str) -> Mapping[str, str]:
    files = metadata.get(name) or {}
    if not isinstance(files, Mapping):
        kind = type(files).__name__
        raise FolderError(f"the task's metadata.{name} is a {kind}; give texts by their paths in the folder")
    return files


def _attempt_variables() -> tuple[str, dict[str, str], str]:
    """The server's address, variables with the rollout's address and key, and that key; none outside of a rollout."""
    redirection = installed_redirection()
    rollout = None if redirection is None else redirection.scope.current()
    if redirection is None or rollout is None:
        return "", {}, ""
    url = redirection.server_url
    return url, gateway_environment(url, redirection.dialects, rollout.base_path, rollout.key), rollout.key


def _own_variables(room: Room, *, of_check: bool = False) -> dict[str, str]:
    """The worker's variables, less those that no program in a room should see, with folders of the room's own. A check
    has the worker's Python."""
    redirection = installed_redirection()
    dialects = () if redirection is None else redirection.dialects
    models = {name for dialect in dialects for name in (*dialect.base_variables, *dialect.key_variables)}
    left_out = models if of_check else models | PYTHON
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT) and name not in left_out
    }
    home = room.home
    return {
        **variables,
        "PWD": str(room.work),
        "HOME": str(home),
        "TMPDIR": str(room.tmp),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "XDG_STATE_HOME": str(home / ".local/state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "CODEX_HOME": str(home / ".codex"),
        "GIT_AUTHOR_NAME": "agent",
        "GIT_AUTHOR_EMAIL": "agent@localhost",
        "GIT_COMMITTER_NAME": "agent",
        "GIT_COMMITTER_EMAIL": "agent@localhost",
    }
