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
import errno
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from lightningrl.errors import ConfigError, LightningError
from lightningrl.keys import Mask
from lightningrl.processes import ENDING_S, keeping, start_error
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_client.runtime.environment import gateway_environment, telemetry_environment

__all__ = ["CommandFailed", "command_agent", "describe_end", "kept_program", "wait_for"]

T = TypeVar("T")
LONGEST_TAIL: Final = 2_000
"""Characters of what it said in an error."""
KEPT_OUTPUT: Final = 8 * 2**20
"""Bytes of the end of a program's stdout or stderr that are read; the rest is dropped as it comes."""


class CommandFailed(LightningError):
    """The program ended with a status other than 0, or said nothing."""


def command_agent(
    *command: str, environment: Mapping[str, str] | None = None, telemetry: bool = True
) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """An agent that runs `command` once for each rollout; relative paths are seen from the recipe's folder.

    The output is the last line on stdout that is not blank: read as JSON where it is an object, a list or a quoted
    string, else taken as the text it is. The program ends with all that it started (elsewhere than on Linux: with its
    process group) when it has answered, the rollout's time is over, it is cancelled or this process dies. `environment`
    is added to the worker's. `telemetry` False = without the variables by which OpenTelemetry's exporters send the
    program's spans to its attempt. Raises ConfigError for an empty command.
    """
    if not command or not all(isinstance(part, str) and part for part in command):
        raise ConfigError(f"command_agent{command!r} names no program; write command_agent('node', 'agent.mjs')")

    more = dict(environment or {})

    async def answer(task_input: Any) -> Any:
        variables, key = _attempt_environment({**os.environ, **more}, telemetry=telemetry)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        async with kept_program(command, env={**os.environ, **variables, **more}, **pipes) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            _, output, errors = await asyncio.gather(
                _write(process.stdin, json.dumps(task_input).encode() + b"\n"),
                _read_end(process.stdout),
                _read_end(process.stderr),
            )
            await process.wait()
        if len(output) == KEPT_OUTPUT and b"\n" not in output.strip():
            raise CommandFailed(
                f"{' '.join(command)!r} printed a last line of more than {KEPT_OUTPUT} bytes; shorten it"
            )
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


@contextlib.asynccontextmanager
async def kept_program(
    command: Sequence[str], *, grace_s: float = 0.0, most_bytes: int = 0, **options: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program under a keeper, which ends with the block, and with it all that the program started: killed
    `grace_s` after SIGTERM. `most_bytes` bounds each of its files. Raises CommandFailed where it cannot start."""
    lifeline, theirs = socket.socketpair()
    with lifeline:
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *keeping(theirs, grace_s, most_bytes),
                    *command,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                    **options,
                )
        except (OSError, ValueError) as error:
            raise CommandFailed(_describe_no_start(command[0], error)) from error
        try:
            yield process
        finally:
            await _end(process, grace_s)
        if (failed := start_error(lifeline)) is not None:
            raise CommandFailed(_describe_no_start(command[0], failed))


def _describe_no_start(program: str, error: OSError | ValueError) -> str:
    problem, remedy = str(error), "install it, or give its path"
    if isinstance(error, ValueError):
        problem, remedy = "an argument or a variable holds a NUL character", "take it out of the task's input"
    elif error.errno == errno.E2BIG:
        problem = "its arguments are longer than the system takes (128 kB each on Linux)"
        remedy = "give the task on standard input, or shorten it"
    return f"{program!r} cannot be started: {problem}; {remedy}"


async def wait_for(task: asyncio.Future[T]) -> T:
    """Wait for its result, and for its end when cancelled meanwhile."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Have the keeper end all, and wait for that."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # the program may have stopped it
    ending = asyncio.ensure_future(asyncio.wait_for(process.wait(), grace_s + ENDING_S))
    try:
        await wait_for(ending)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _write(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not read it
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    end = bytearray()
    while part := await stream.read(2**16):
        end += part
        if len(end) > 2 * KEPT_OUTPUT:
            del end[:-KEPT_OUTPUT]
    return bytes(end[-KEPT_OUTPUT:])
