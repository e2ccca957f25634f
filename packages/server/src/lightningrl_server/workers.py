"""Workers of a run, as they report themselves, and their routes: beat, list, stop, give back what they ran. In memory:
a restarted server knows a worker again from its next beat on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl.control_api import Orders, WorkerBeat, WorkerFilter
from lightningrl.control_api import Workers as WorkerList
from lightningrl.records import RunningAttempt, WorkerRecord, WorkerState
from lightningrl_server.access import Access, Forbidden
from lightningrl_server.gateway.model_call import while_connected
from lightningrl_server.routes import count_of, route
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.protocol import Queue

__all__ = ["Workers", "worker_routes"]

MOST_WORKERS: Final = 10_000
"""Largest number that is remembered; beyond it, the one not heard of for longest is forgotten."""

ENDS: Final = frozenset({WorkerState.FAILED, WorkerState.LOST})
"""States that end the wait for workers: no process in which an agent runs says so."""

logger = logging.getLogger(__name__)


class Workers:
    """Workers of this server. Used on one event loop."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._version = time.time_ns() & 0x7FFFFFFF  # so that a restarted server does not seem unchanged
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()

    async def beat(
        self, worker_id: str, beat: WorkerBeat, keep: Callable[[str, int, float], Awaitable[bool]]
    ) -> Orders:
        """Note how the worker is; `keep(rollout, attempt, lease_s)` renews a lease, False = the attempt is over."""
        self._note(worker_id, beat)
        over: list[tuple[str, int]] = []
        for rollout_id, attempt in beat.running:
            try:
                is_ours = await keep(rollout_id, attempt, beat.lease_s)
            except UnknownRecord:
                is_ours = False
            if not is_ours:
                over.append((rollout_id, attempt))
        await _wait(0.0 if over else beat.wait_s, lambda: self._stopped if not self.is_stopping(worker_id) else None)
        return Orders(stop=self.is_stopping(worker_id), over=over)

    async def look(
        self, where: WorkerFilter, running: Callable[[str], Awaitable[Sequence[RunningAttempt]]]
    ) -> WorkerList:
        """List those of the prefix, with what they run. A worker that is not heard of for as long as its leases last is
        forgotten, unless it said what is wrong."""
        await _wait(where.wait_s, lambda: self._changed if self._version == where.seen else None)
        now = time.time()
        heard = [record for record in self._records.values() if record.error or record.last_beat + record.lease_s > now]
        self._records = {record.id: record for record in heard}
        version, records = self._version, [record for record in heard if record.id.startswith(where.prefix)]
        return WorkerList(version=version, workers=records, running=await running(where.prefix))

    def states(self, now: float) -> dict[str, int]:
        """Count the workers in each state that were heard of lately. `now`: Unix seconds."""
        heard = [one.state.value for one in self._records.values() if one.last_beat + one.lease_s > now]
        return {state.value: heard.count(state.value) for state in WorkerState}

    def stop(self, prefix: str) -> int:
        """Stop those of the prefix, who hear it at once; return how many."""
        records = [record for record in self._records.values() if record.id.startswith(prefix)]
        for record in records:
            self._records[record.id] = replace(record, is_stopping=True)
        self._stopped = _turn(self._stopped)
        return len(records)

    def is_stopping(self, worker_id: str) -> bool:
        """True for a worker that is to take no more. `worker_id` may name a slot of it: `id/slot`."""
        record = self._records.get(worker_id.partition("/")[0])
        return record is not None and record.is_stopping

    def note_lease(self, worker_id: str) -> None:
        """Note that the worker was given an attempt. `worker_id` may name a slot of it: `id/slot`."""
        name = worker_id.partition("/")[0]
        record = self._records.get(name)
        if record is not None:
            self._records[name] = replace(record, leases=record.leases + 1)

    def _note(self, worker_id: str, beat: WorkerBeat) -> None:
        now = time.time()
        entry = self._records.pop(worker_id, None)
        if entry is None or entry.pid != beat.pid or entry.host != beat.host:
            entry = WorkerRecord(id=worker_id, host=beat.host, pid=beat.pid, state=beat.state, since=now, last_beat=now)
            self._change()
        elif entry.state != beat.state:
            entry = replace(entry, state=beat.state, since=now)
            self._change()
        if beat.error and beat.error != entry.error:
            logger.warning("worker %s on %s %s: %s", worker_id, beat.host, beat.state, beat.error)
        entry = replace(entry, last_beat=now, error=beat.error, grace_s=beat.grace_s, lease_s=beat.lease_s)
        self._records[worker_id] = entry  # the newest at the end
        if len(self._records) > MOST_WORKERS:
            del self._records[next(iter(self._records))]

    def _change(self) -> None:
        self._version += 1
        self._changed = _turn(self._changed)


def _turn(event: asyncio.Event) -> asyncio.Event:
    """Wake whoever waits; return a new event for the next ones."""
    event.set()
    return asyncio.Event()


async def _wait(wait_s: float, event: Callable[[], asyncio.Event | None]) -> None:
    """Wait until there is no event to wait for, at most `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            while (waited := event()) is not None:
                await waited.wait()
    except TimeoutError:
        return


def worker_routes(queue: Queue, access: Access, workers: Workers, *, longest_wait_s: float) -> list[BaseRoute]:
    async def beat(request: Request, body: api.WorkerBeat) -> api.Orders:
        body.wait_s = min(body.wait_s, longest_wait_s)
        name, worker = request.path_params["wid"], access.worker_shown(request)
        access.check_worker(request, name)
        if worker and body.state in ENDS:
            raise Forbidden(
                f"worker {worker!r} cannot say that it is {body.state.value}, which ends the run: its supervisor does"
            )
        if worker:
            body.error = ""
        keep = partial(queue.heartbeat, worker_id=worker or None)
        return await while_connected(request.receive, workers.beat(name, body, keep)) or api.Orders()

    async def listed(request: Request, where: api.WorkerFilter) -> api.Workers:
        where.wait_s = min(where.wait_s, longest_wait_s)
        return await while_connected(request.receive, workers.look(where, queue.running)) or api.Workers()

    async def stop(_: Request, body: api.WorkerPrefix) -> api.Count:
        return api.Count(count=workers.stop(body.prefix))

    return [
        route(api.BEAT, access, beat),
        route(api.WORKERS, access, listed),
        route(api.STOP_WORKERS, access, stop),
        route(api.INTERRUPT_WORKERS, access, lambda _, body: count_of(queue.interrupt(body.reason, body.prefix))),
    ]
