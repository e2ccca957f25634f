"""Runs the agent once: in the calling thread (sync) or on the worker's event loop (async), and says how it ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lightningrl.control_api import Result
from lightningrl.records import Lease
from lightningrl.types import Outcome
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_client.runtime.agent_loader import LoadedAgent
from lightningrl_client.runtime.report import report_exception, report_output

__all__ = ["Attempt", "RunOnLoop"]

CANCELLED: Final = (asyncio.CancelledError, concurrent.futures.CancelledError)
"""Cancellation on the agent's own loop, and on a loop that several agents share."""
RunOnLoop = Callable[[Awaitable[Any]], Any]
"""Runs an awaitable on the worker's loop, in the caller's context, and returns its result."""


class Attempt:
    """One leased attempt while it runs. `revoke` may be called from another thread."""

    def __init__(self, lease: Lease, rollout: ActiveRollout, infrastructure: Sequence[str] = ()) -> None:
        """`infrastructure`: names of exceptions that the recipe counts to the world's failures."""
        self.lease = lease
        self.rollout = rollout
        self._infrastructure = tuple(infrastructure)
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_revoked = False
        self._has_ended = False

    def run(self, agent: LoadedAgent, run_on_loop: RunOnLoop) -> Result:
        """Call the agent with the task's input. Whatever it raises becomes a report."""
        started = time.perf_counter()
        task = self.lease.task
        arguments = (task.input, task) if agent.takes_task else (task.input,)
        try:
            if agent.is_async:
                output = run_on_loop(self._await(agent.function(*arguments)))
            else:
                output = contextvars.copy_context().run(agent.function, *arguments)
                if inspect.isawaitable(output):
                    output = run_on_loop(self._await(output))
            return report_output(output, agent=agent.name, duration_s=time.perf_counter() - started)
        except BaseException as error:  # noqa: BLE001  the boundary: an agent's failure is data
            is_in_thread = not agent.is_async and threading.current_thread() is not threading.main_thread()
            return self._report(error, time.perf_counter() - started, is_in_thread=is_in_thread)
        finally:
            with self._lock:
                self._has_ended = True

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def revoke(self) -> bool:
        """Stop the agent, because the attempt was taken away. False = it cannot be stopped from inside: it is not on
        the loop. One that has ended needs none: the server may know of it before a heartbeat that is on its way."""
        with self._lock:
            if self._has_ended:
                return True
            self._is_revoked = True
            if self._task is None or self._loop is None:
                return False
            self._loop.call_soon_threadsafe(self._task.cancel)
            return True

    async def _await(self, output: Awaitable[Any]) -> Any:
        with self._lock:
            self._task = asyncio.current_task()
            self._loop = asyncio.get_running_loop()
            if self._is_revoked:
                raise asyncio.CancelledError
        limit = asyncio.timeout(self.lease.timeout_s)
        try:
            async with limit:
                return await output
        except TimeoutError as error:
            if limit.expired():
                raise AttemptTimeoutError(f"the agent ran longer than {self.lease.timeout_s:g} s") from error
            raise
        finally:
            with self._lock:
                self._task = None
            # what it runs in threads goes on, and the next would wait for a free one
            if self._is_revoked or limit.expired():
                asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))

    def _report(self, error: BaseException, duration_s: float, *, is_in_thread: bool) -> Result:
        if isinstance(error, AttemptTimeoutError):
            return Result(outcome=Outcome.TIMEOUT, error=str(error), duration_s=duration_s)
        if self._is_revoked and isinstance(error, CANCELLED):
            return Result(outcome=Outcome.CANCELLED, error="the attempt was cancelled", duration_s=duration_s)
        return report_exception(
            error,
            self.rollout,
            duration_s=duration_s,
            infrastructure=self._infrastructure,
            is_in_thread=is_in_thread,
        )


class AttemptTimeoutError(Exception):
    """The attempt's own time limit passed; a TimeoutError of the agent's is something else."""
