"""Which engine answers: engines by policy, held during weight updates, replaced when they die.

generate ─► a seat that is connected and not held (waits, bounded) ─► chunks
                └─ engine gone before anything was passed on: the same call on the next seat
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from lightningrl.backends import Engine, EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import EngineUnavailable
from lightningrl.records import PolicyStatus
from lightningrl.types import FinishReason

__all__ = ["EngineGone", "EngineRegistry", "closing"]


_MOST_OVERRIDDEN = 32
"""Settings, or fields, that are told apart."""
_LONGEST_FIELD = 64
_MOST_DEATHS = 4
"""Engines that may go away under one call: perhaps it is the call that they go away from."""


class EngineGone(EngineUnavailable):
    """The engine went away in mid-call; another may answer."""


@dataclass(slots=True, eq=False)
class _Seat:
    engine: Engine
    held: bool = False
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Policy:
    seats: list[_Seat] = field(default_factory=list[_Seat])
    free: asyncio.Event = field(default_factory=asyncio.Event)
    info: EngineInfo | None = None
    has_info: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: int = 0
    overridden: Counter[str] = field(default_factory=Counter[str])
    ignored: Counter[str] = field(default_factory=Counter[str])

    def refresh(self) -> None:
        for seat in self.seats:
            self.info = seat.engine.info
            self.has_info.set()
        if any(not seat.held for seat in self.seats):
            self.free.set()
        else:
            self.free.clear()


class EngineRegistry:
    """All engines of a run. Built inside the event loop that uses it."""

    def __init__(self, *, wait_s: float = 600.0) -> None:
        """`wait_s` bounds how long one call waits for an engine: while none is connected, and while it is held."""
        self.wait_s = wait_s
        self._policies: dict[str, _Policy] = {}

    def attach(self, engine: Engine, *, held: bool = False) -> None:
        """Let an engine serve its policy."""
        policy = self._policies.setdefault(engine.info.policy, _Policy())
        policy.seats.append(_Seat(engine, held))
        policy.refresh()

    def detach(self, engine: Engine) -> None:
        """Take out an engine that is gone; what it was generating fails by itself with `EngineGone`."""
        policy = self._policies[engine.info.policy]
        policy.seats = [seat for seat in policy.seats if seat.engine is not engine]
        policy.refresh()

    def hold(self, engine: Engine, *, held: bool = True) -> None:
        """Let new calls wait, those in flight go on; where it is no longer `held`, serve again, what waits first."""
        policy = self._policies[engine.info.policy]
        for seat in policy.seats:
            if seat.engine is engine:
                seat.held = held
        policy.refresh()

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy an engine was ever connected for."""
        return tuple(self._policies)

    def status(self) -> tuple[PolicyStatus, ...]:
        """For showing."""
        return tuple(
            PolicyStatus(
                policy=name,
                version=policy.info.version if policy.info else None,
                connected=len(policy.seats),
                held=bool(policy.seats) and not policy.free.is_set(),
                in_flight=policy.in_flight,
                overridden=dict(policy.overridden),
                ignored=dict(policy.ignored),
            )
            for name, policy in self._policies.items()
        )

    def note_overridden(self, policy: str, settings: Iterable[str]) -> None:
        """A call asked for these sampling settings, and was not given them."""
        _note(self._policies.setdefault(policy, _Policy()).overridden, settings)

    def note_ignored(self, policy: str, fields: Iterable[str]) -> bool:
        """A call had these fields, and nobody reads them. True where one of them is new."""
        ignored = self._policies.setdefault(policy, _Policy()).ignored
        before = len(ignored)
        _note(ignored, (name[:_LONGEST_FIELD] for name in fields))
        return len(ignored) > before

    async def info(self, policy: str) -> EngineInfo:
        """The newest engine of the policy; waits for the first engine. Raises EngineUnavailable after `wait_s`."""
        state = self._policies.setdefault(policy, _Policy())
        if state.info is None:
            await self._wait(state.has_info, policy, asyncio.get_running_loop().time() + self.wait_s)
        assert state.info is not None
        return state.info

    def context_length(self, policy: str) -> int | None:
        """Context of the policy's newest engine; None = none was ever connected."""
        state = self._policies.get(policy)
        return None if state is None or state.info is None else state.info.context_length

    async def generate(self, policy: str, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one completion as they are sampled, all of one version."""
        state, deadline = self._begin(policy)
        with _counted(state):
            for _ in range(_MOST_DEATHS):
                seat = await self._seat(state, policy, deadline)
                passed_on = False
                try:
                    with _counted(seat):
                        async with aclosing(_checked(policy, seat.engine, request)) as chunks:
                            async for chunk in chunks:
                                passed_on = True
                                yield chunk
                    return
                except EngineGone as error:
                    if passed_on:
                        raise EngineUnavailable(
                            f"the engine of policy {policy!r} went away in mid-call; send the call again"
                        ) from error
        raise _too_many_deaths(policy)

    async def generate_whole(self, policy: str, request: GenerateRequest) -> TokenChunk:
        """One completion as one chunk; an engine's death is not seen."""
        state, deadline = self._begin(policy)
        with _counted(state):
            for _ in range(_MOST_DEATHS):
                seat = await self._seat(state, policy, deadline)
                with _counted(seat), suppress(EngineGone):
                    return await _gather(policy, seat.engine, request)
        raise _too_many_deaths(policy)

    def _begin(self, policy: str) -> tuple[_Policy, float]:
        return self._policies.setdefault(policy, _Policy()), asyncio.get_running_loop().time() + self.wait_s

    async def _seat(self, state: _Policy, policy: str, deadline: float) -> _Seat:
        while True:
            if not state.free.is_set():
                await self._wait(state.free, policy, deadline)
            seats = [seat for seat in state.seats if not seat.held]
            if seats:
                return min(seats, key=lambda seat: seat.in_flight)

    async def _wait(self, event: asyncio.Event, policy: str, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            held = bool(self._policies[policy].seats)
            why = "is still held for a weight update" if held else "has no engine connected"
            raise EngineUnavailable(
                f"policy {policy!r} {why} after {self.wait_s:g} s; is the trainer running?"
            ) from None


def _note(counts: Counter[str], names: Iterable[str]) -> None:
    for name in names:
        if name in counts or len(counts) < _MOST_OVERRIDDEN:
            counts[name] += 1


def _too_many_deaths(policy: str) -> EngineUnavailable:
    problem = f"{_MOST_DEATHS} engines of policy {policy!r} went away under this call"
    return EngineUnavailable(f"{problem}; see the trainer's log, then send the call again")


def closing(chunks: AsyncIterator[TokenChunk]) -> aclosing[AsyncGenerator[TokenChunk, None]]:
    """Close an engine's iterator in the end, whatever happens: that frees the request's place."""
    return aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks))


@contextmanager
def _counted(place: _Seat | _Policy) -> Iterator[None]:
    place.in_flight += 1
    try:
        yield
    finally:
        place.in_flight -= 1


async def _checked(policy: str, engine: Engine, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    """One engine's chunks; refuses a call that mixes versions or ends without its last chunk."""
    version: int | None = None
    finish: FinishReason | None = None
    async with closing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if version is None:
                version = chunk.policy_version
            elif version != chunk.policy_version:
                raise EngineUnavailable(
                    f"policy {policy!r} changed from version {version} to {chunk.policy_version} in mid-call; "
                    "hold the engine while weights change, then send the call again"
                )
            finish = chunk.finish_reason
            yield chunk
    if finish is None:
        raise EngineGone(f"the engine of policy {policy!r} ended a completion without a finish reason")


async def _gather(policy: str, engine: Engine, request: GenerateRequest) -> TokenChunk:
    whole: Any = getattr(engine, "generate_whole", None)  # the engine link's: one message is cheaper than many
    if whole is not None:
        answer: TokenChunk = await whole(request)
        return answer
    async with aclosing(_checked(policy, engine, request)) as chunks:
        parts = [chunk async for chunk in chunks]
    return TokenChunk(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        policy_version=parts[-1].policy_version,
        finish_reason=parts[-1].finish_reason,
    )
