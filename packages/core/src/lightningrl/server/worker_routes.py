"""The workers' side of the control API beside their attempts: how they are, who there is, stop."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute

from lightningrl.control import api
from lightningrl.server.access import Access
from lightningrl.server.attempt_routes import while_connected
from lightningrl.server.routes import route
from lightningrl.server.workers import Workers
from lightningrl.store.protocol import Queue

__all__ = ["worker_routes"]


def worker_routes(queue: Queue, access: Access, workers: Workers, *, longest_wait_s: float) -> list[BaseRoute]:
    async def beat(request: Request, body: api.WorkerBeat) -> api.Orders:
        body.wait_s = min(body.wait_s, longest_wait_s)
        return await while_connected(request, workers.beat(request.path_params["wid"], body, queue.heartbeat)) or api.Orders()

    async def listed(request: Request, where: api.WorkerFilter) -> api.Workers:
        where.wait_s = min(where.wait_s, longest_wait_s)
        return await while_connected(request, workers.look(where, queue.running)) or api.Workers()

    async def stop(_: Request, body: api.WorkerPrefix) -> api.Count:
        return api.Count(count=workers.stop(body.prefix))

    return [route(api.BEAT, access, beat), route(api.WORKERS, access, listed), route(api.STOP_WORKERS, access, stop)]
