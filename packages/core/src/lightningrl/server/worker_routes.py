"""The workers' side of the control API beside their attempts: how they are, who there is, stop, give back what they ran."""

from __future__ import annotations

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.routing import BaseRoute

from lightningrl.control import api
from lightningrl.server.access import Access, Forbidden
from lightningrl.server.attempt_routes import while_connected
from lightningrl.server.routes import route
from lightningrl.server.workers import Workers
from lightningrl.store.protocol import Queue

__all__ = ["worker_routes"]

ENDS: Final = frozenset({api.WorkerState.FAILED, api.WorkerState.LOST})
"""Whoever waits for the workers waits no longer: no process says so in which an agent runs."""


def worker_routes(queue: Queue, access: Access, workers: Workers, *, longest_wait_s: float) -> list[BaseRoute]:
    async def beat(request: Request, body: api.WorkerBeat) -> api.Orders:
        body.wait_s = min(body.wait_s, longest_wait_s)
        name, worker = request.path_params["wid"], access.worker_shown(request)
        access.check_worker(request, name)
        if worker and body.state in ENDS:
            raise Forbidden(f"worker {worker!r} cannot say that it is {body.state.value}, which ends the run: its supervisor does")
        if worker:
            body.error = ""
        keep = partial(queue.heartbeat, worker_id=worker or None)
        return await while_connected(request, workers.beat(name, body, keep)) or api.Orders()

    async def listed(request: Request, where: api.WorkerFilter) -> api.Workers:
        where.wait_s = min(where.wait_s, longest_wait_s)
        return await while_connected(request, workers.look(where, queue.running)) or api.Workers()

    async def stop(_: Request, body: api.WorkerPrefix) -> api.Count:
        return api.Count(count=workers.stop(body.prefix))

    async def interrupt(_: Request, body: api.InterruptWorkers) -> api.Count:
        return api.Count(count=await queue.interrupt(body.reason, body.prefix))

    return [
        route(api.BEAT, access, beat),
        route(api.WORKERS, access, listed),
        route(api.STOP_WORKERS, access, stop),
        route(api.INTERRUPT_WORKERS, access, interrupt),
    ]
