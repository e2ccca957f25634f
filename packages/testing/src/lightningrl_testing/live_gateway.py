"""A real server on a loopback port, gateway and control API, with a real SQLite store and a scripted engine.

async with live_gateway(folder) as gateway:
    gateway.engine.enqueue("42")
    attempt = await gateway.attempt()
    client = AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key)
    await client.chat.completions.create(model="any", messages=[…])
    (call,) = await attempt.transitions()
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp

from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.types import BranchPoint, RolloutSpec, SamplingSettings, Task, Transition
from lightningrl_server.asked_calls import read_kept_answers
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.engines.socket import engine_route
from lightningrl_server.gateway.app import Gateway, create_gateway
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import Store
from lightningrl_testing.loopback import serving
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["LiveAttempt", "LiveGateway", "live_gateway"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAttempt:
    """A running attempt: where its agent sends calls, and with which key."""

    rollout_id: str
    attempt: int
    key: str
    base_url: str
    store: Store

    async def transitions(self) -> tuple[Transition, ...]:
        """Its recorded calls so far."""
        return tuple(call.transition for call in await self.store.calls(self.rollout_id, self.attempt))


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveGateway:
    """A running gateway."""

    url: str
    store: Store
    engines: EngineRegistry
    gateway: Gateway
    engine: ScriptedEngine
    run_key: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def attempt(
        self,
        *,
        sampling: SamplingSettings | None = None,
        rollout_id: str | None = None,
        branch: BranchPoint | None = None,
    ) -> LiveAttempt:
        """Lease an attempt of a new rollout."""
        rollout_id = rollout_id or f"r{next(self._numbers)}"
        spec = RolloutSpec(
            id=rollout_id, task=Task(id=rollout_id, input="task"), group_id=rollout_id, sampling=sampling, branch=branch
        )
        await self.store.create_rollouts([spec])
        lease = await self.store.lease("worker", lease_s=3600)
        assert lease is not None and lease.rollout_id == rollout_id, (
            "another rollout waits in the store; lease it first"
        )
        return LiveAttempt(
            rollout_id=rollout_id,
            attempt=lease.attempt,
            key=lease.key,
            base_url=self.url + lease.base_path,
            store=self.store,
        )


@asynccontextmanager
async def live_gateway(
    folder: Path,
    *,
    store_url: str | None = None,
    engine: ScriptedEngine | None = None,
    attach: bool = True,
    settings: GatewaySettings | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    renderer: PolicyRenderer | None = None,
    wait_s: float = 30.0,
    max_body_bytes: int = 32 * 2**20,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[LiveGateway]:
    """Run a gateway. `folder` takes the store, where it has no `store_url`. `attach=False` leaves the engine out, for
    one that comes over the engine link. `around` may look at what arrives."""
    from lightningrl_server.app import create_app
    from lightningrl_server.metrics import ServerMetrics
    from lightningrl_server.store import SqlStore

    engine = engine or ScriptedEngine(tiny_tokenizer())
    store = await SqlStore.open(store_url or f"sqlite:///{folder / 'store.sqlite'}")
    engines = EngineRegistry(wait_s=wait_s)
    if attach:
        engines.attach(engine)
    run_key = "the-run-key"
    renderers = {engine.policy: renderer or PolicyRenderer(engine.tokenizer)}
    metrics = ServerMetrics()
    gateway = create_gateway(store, engines, renderers, settings, dialects, metrics)
    app = create_app(
        store,
        engines,
        run_key=run_key,
        routes=[engine_route(engines, run_key), *gateway.routes],
        memory=gateway,
        dialects=dialects,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        read_asked=read_kept_answers(store, renderers),
        tokenizers={name: renderer.tokenizer for name, renderer in renderers.items()},
    )
    try:
        async with serving(
            around(app), ws="websockets-sansio", ws_per_message_deflate=False, timeout_keep_alive=300
        ) as url:
            yield LiveGateway(store=store, engines=engines, gateway=gateway, engine=engine, run_key=run_key, url=url)
    finally:
        await store.close()
