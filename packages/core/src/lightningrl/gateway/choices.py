"""The choices of one call: sampled together, each a transition of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from lightningrl.errors import EngineUnavailable
from lightningrl.gateway.completion import Choice, CompletionText, TextDelta
from lightningrl.gateway.engines import EngineRegistry
from lightningrl.gateway.rendering import PolicyRenderer
from lightningrl.gateway.request import CallRequest
from lightningrl.types import GenerateRequest, SamplingSettings

__all__ = ["SampledChoice", "sample_choices"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledChoice:
    """A whole completion with what sampled it."""

    id: str
    """Transition id."""
    choice: Choice
    version: int
    sampling: SamplingSettings
    last_delta: TextDelta
    """What of it may be sent only once it is recorded."""


async def sample_choices(
    engines: EngineRegistry,
    policy: str,
    renderer: PolicyRenderer,
    request: CallRequest,
    prompt_ids: tuple[int, ...],
    sampling: SamplingSettings,
    transition_id: str,
) -> AsyncGenerator[TextDelta | SampledChoice, None]:
    """Deltas as they come where `request.stream`, and each choice when it is whole."""

    def one(index: int) -> AsyncGenerator[TextDelta | SampledChoice, None]:
        text = CompletionText(
            renderer,
            prompt_ids,
            index=index,
            allow_tools=bool(request.tools) and request.allow_tools,
            parallel_tools=request.parallel_tools,
            stop=sampling.stop,
        )
        own = sampling if index == 0 or sampling.seed is None else replace(sampling, seed=sampling.seed + index)
        call = GenerateRequest(id=transition_id if index == 0 else f"{transition_id}-{index}", prompt_ids=prompt_ids, sampling=own)
        return _sample_one(engines, policy, call, text, stream=request.stream)

    if request.n == 1:
        async with aclosing(one(0)) as items:
            async for item in items:
                yield item
        return
    queue: asyncio.Queue[TextDelta | SampledChoice] = asyncio.Queue()

    async def pump(index: int) -> None:
        async with aclosing(one(index)) as items:
            async for item in items:
                queue.put_nowait(item)

    pumps = asyncio.gather(*(pump(index) for index in range(request.n)))
    waiting: asyncio.Future[Any] = asyncio.ensure_future(asyncio.shield(pumps))
    try:
        whole = 0
        while whole < request.n:
            getter: asyncio.Future[Any] = asyncio.ensure_future(queue.get())
            await asyncio.wait({getter, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not getter.done() and queue.empty():
                getter.cancel()
                await pumps  # raises what went wrong
            item = await getter
            whole += isinstance(item, SampledChoice)
            yield item
        await pumps
    finally:
        pumps.cancel()
        await asyncio.gather(pumps, return_exceptions=True)


async def _sample_one(
    engines: EngineRegistry, policy: str, call: GenerateRequest, text: CompletionText, *, stream: bool
) -> AsyncGenerator[TextDelta | SampledChoice, None]:
    async with aclosing(engines.generate(policy, call, stream=stream)) as chunks:
        async for chunk in chunks:
            delta = text.push(chunk.token_ids, chunk.logprobs, stream=stream and chunk.finish_reason is None)
            if delta is not None:
                yield delta
            if chunk.finish_reason is not None:
                if text.token_count == 0:
                    raise EngineUnavailable(f"the engine of policy {policy!r} returned a completion without a token")
                choice, last = text.finish(chunk.finish_reason)
                yield SampledChoice(id=call.id, choice=choice, version=chunk.policy_version, sampling=call.sampling, last_delta=last)
