"""The choices of one call: sampled together, each a transition of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from lightningrl.errors import EngineUnavailable
from lightningrl.types import GenerateRequest, SamplingSettings, TokenChunk
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.request import CallRequest
from lightningrl_server.rendering.completion import Choice, CompletionText, ShownText, TextDelta
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["ChoiceSampler", "SampledChoice"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledChoice:
    """A choice with what sampled it."""

    id: str
    """Transition id."""
    completion: Choice
    version: int
    sampling: SamplingSettings
    last_delta: TextDelta
    """The last text, held back until the call is stored."""
    replayed_from: str | None = None
    """The recorded call that it repeats; None = it was sampled now."""


class ChoiceSampler:
    """Samples the choices of one request."""

    def __init__(
        self,
        engines: EngineRegistry,
        policy: str,
        renderer: PolicyRenderer,
        request: CallRequest,
        prompt_ids: tuple[int, ...],
        sampling: SamplingSettings,
        transition_id: str,
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._renderer = renderer
        self._request = request
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._id = transition_id
        self._streamed: dict[int, tuple[GenerateRequest, CompletionText, int]] = {}
        """By index; with the policy's version."""

    async def whole(self) -> list[SampledChoice]:
        """All choices, in order."""
        if self._request.n == 1:
            return [await self._one_whole(0)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for index in range(self._request.n):
                    tasks.append(group.create_task(self._one_whole(index)))
                    await asyncio.sleep(0)  # a long prompt takes its time to be sent: others have their turn between
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first choice that failed says why the call did
        return [task.result() for task in tasks]

    async def stream(self) -> AsyncGenerator[TextDelta | SampledChoice, None]:
        """Deltas as they come, and each choice when it is whole."""
        if self._request.n == 1:
            async with aclosing(self._one(0)) as items:
                async for item in items:
                    yield item
            return
        queue: asyncio.Queue[TextDelta | SampledChoice | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(index)) as items:
                    async for item in items:
                        queue.put_nowait(item)
            finally:
                queue.put_nowait(None)

        pumps: list[asyncio.Task[None]] = []
        try:
            for index in range(self._request.n):
                pumps.append(asyncio.create_task(pump(index)))
                await asyncio.sleep(0)
            ended = 0
            while ended < len(pumps):
                following = await queue.get()
                if following is not None:
                    yield following
                    continue
                ended += 1
                for task in pumps:
                    if task.done():
                        task.result()  # raises what went wrong
            await asyncio.gather(*pumps)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def broken_off(self, shown: Mapping[int, ShownText]) -> list[SampledChoice]:
        """The part of each choice that an agent that left the stream was shown, in order."""
        found = []
        for index, (call, text, version) in sorted(self._streamed.items()):
            if index in shown:
                completion = text.broken_off(shown[index])
                found.append(
                    SampledChoice(
                        id=call.id, completion=completion, version=version, sampling=call.sampling, last_delta=TextDelta(index=index)
                    )
                )
        return found

    def _place(self, index: int) -> tuple[GenerateRequest, CompletionText]:
        sampling = self._sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        text = CompletionText(
            self._renderer,
            self._prompt_ids,
            index=index,
            allow_tools=bool(self._request.tools) and self._request.allow_tools,
            schemas=self._request.schemas,
            parallel_tools=self._request.parallel_tools,
            stop=sampling.stop,
        )
        call_id = f"{self._id}-{index}" if index else self._id
        session = self._id.rpartition("/")[0]  # rollout/attempt
        return GenerateRequest(id=call_id, prompt_ids=self._prompt_ids, sampling=sampling, session=session), text

    async def _one_whole(self, index: int) -> SampledChoice:
        call, text = self._place(index)
        chunk = await self._engines.generate_whole(self._policy, call)
        text.push(chunk.token_ids, chunk.logprobs, stream=False)
        return self._finished(call, text, chunk)

    async def _one(self, index: int) -> AsyncGenerator[TextDelta | SampledChoice, None]:
        call, text = self._place(index)
        async with aclosing(self._engines.generate(self._policy, call)) as chunks:
            async for chunk in chunks:
                self._streamed[index] = call, text, chunk.policy_version
                delta = text.push(chunk.token_ids, chunk.logprobs, stream=chunk.finish_reason is None)
                if delta is not None:
                    yield delta
                if chunk.finish_reason is not None:
                    yield self._finished(call, text, chunk)

    def _finished(self, call: GenerateRequest, text: CompletionText, last: TokenChunk) -> SampledChoice:
        if text.token_count == 0 or last.finish_reason is None:
            raise EngineUnavailable(f"the engine of policy {self._policy!r} returned a completion without a token or a finish reason")
        completion, delta = text.finish(last.finish_reason)
        return SampledChoice(id=call.id, completion=completion, version=last.policy_version, sampling=call.sampling, last_delta=delta)
