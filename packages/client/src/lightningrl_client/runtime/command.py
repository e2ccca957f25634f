"""An agent that is a program of its own: another language, another virtual environment, none of our packages in it.

    from lightningrl import command_agent
    answer = command_agent("node", "agent.mjs")      `agent.py`, all of it

stdin        the task's input as JSON, then its end    stdout  its last line is the output
environment  OPENAI_BASE_URL, OPENAI_API_KEY,         status  not 0 = `agent_error`, with the ends of stderr and stdout
             ANTHROPIC_…,
             OTEL_EXPORTER_OTLP_{TRACES,LOGS}_…
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final

from lightningrl.errors import ConfigError, LightningError
from lightningrl.keys import Mask
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_client.runtime.environment import gateway_environment, telemetry_environment

__all__ = ["CommandFailed", "command_agent", "describe_end", "guarded"]

LONGEST_TAIL: Final = 2_000
"""Characters of what it said in an error."""
GUARD: Final = 'read -r _; kill -9 "-$1"'
"""Kills the process group `$1` when its stdin ends: whoever started the program is gone, and could not do so."""


class CommandFailed(LightningError):
    """The program ended with a status other than 0, or said nothing."""


def command_agent(
    *command: str, environment: Mapping[str, str] | None = None, telemetry: bool = True
) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """An agent that runs `command` once for each rollout; relative paths are seen from the recipe's folder.

    The output is the last line on stdout that is not blank: read as JSON where it is an object, a list or a quoted
    string, else taken as the text it is. When the rollout's time is over, it is cancelled or this process dies, the
    program is killed with all that it started, as long as that stays in its process group; the rest ends with the
    worker at the latest. `environment` is added to the worker's. `telemetry` False = without the variables by which
    OpenTelemetry's exporters send the program's spans to its attempt. Raises ConfigError for an empty command.
    """
    if not command or not all(isinstance(part, str) and part for part in command):
        raise ConfigError(f"command_agent{command!r} names no program; write command_agent('node', 'agent.mjs')")

    more = dict(environment or {})

    async def answer(task_input: Any) -> Any:
        variables, key = _attempt_environment({**os.environ, **more}, telemetry=telemetry)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **variables, **more},
                process_group=0,
            )
        except OSError as error:
            raise CommandFailed(f"{command[0]!r} cannot be started: {error}; install it, or give its path") from error
        try:
            with guarded(process.pid):
                output, errors = await process.communicate(json.dumps(task_input).encode() + b"\n")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        text, complaint = output.decode(errors="replace"), errors.decode(errors="replace")
        sys.stderr.write(Mask([key]).text(complaint))
        return read_output(" ".join(command), process.returncode, text, complaint)

    return answer


def read_output(command: str, status: int | None, output: str, errors: str) -> Any:
    """The answer of a program that has ended. Raises CommandFailed with the ends of its stderr and its stdout."""
    # U+2028 and its like may stand in a JSON text
    lines = [line for line in re.split(r"[\r\n]", output) if line.strip()]
    if status != 0 or not lines:
        raise CommandFailed(describe_end(command, status, output, errors))
    answer = lines[-1].strip()
    if answer[0] not in '{["':
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def describe_end(command: str, status: int | None, output: str, errors: str) -> str:
    """A sentence on a program that ended with a status, or in silence where that is 0; the ends of what it said."""
    silent = "said nothing on stdout; print the answer as its last line"
    what = f"ended with status {status}" if status != 0 else silent
    # many programs warn on stderr, and say why on stdout
    texts = [text.strip() for text in (errors, output) if text.strip()]
    tails = [text[-(LONGEST_TAIL // len(texts)) :] for text in texts]
    return "\n".join([f"{command!r} {what}", *tails])


def _attempt_environment(given: Mapping[str, str], *, telemetry: bool) -> tuple[dict[str, str], str | None]:
    """Variables with the attempt's own address and key, also where several attempts run in this worker; and that key.
    Outside of an attempt, what is `given` is left."""
    redirection = installed_redirection()
    rollout = None if redirection is None else redirection.scope.current()
    if redirection is None or rollout is None:
        return {}, None
    url = redirection.server_url
    variables = gateway_environment(url, redirection.dialects, rollout.base_path, rollout.key)
    return variables | telemetry_environment(url, rollout, given) if telemetry else variables, rollout.key


@contextlib.contextmanager
def guarded(group: int) -> Iterator[None]:
    """While it is open, a shell beside this process kills the process group with it. `preexec_fn` could ask the kernel
    for that, but is Python code in the forked child of a process with threads."""
    shell = ("/bin/sh", "-c", GUARD, "sh", str(group))
    with contextlib.ExitStack() as stack:
        # no shell in this container: programs end with their rollouts, or the worker
        with contextlib.suppress(OSError):
            guard = stack.enter_context(subprocess.Popen(shell, stdin=subprocess.PIPE, env={}, process_group=0))
            stack.callback(guard.kill)
        yield
