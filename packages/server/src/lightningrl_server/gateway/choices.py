"""The choices of one call: sampled together, each a transition of its own; or read again from their records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import EngineUnavailable
from lightningrl.types import SamplingSettings
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.request import Answer, CallRequest, Refusal
from lightningrl_server.records import AttemptInfo, CallRecord
from lightningrl_server.rendering.completion import (
    Choice,
    CompletionText,
    ShownText,
    TextDelta,
    ToolReading,
    read_recorded,
)
from lightningrl_server.rendering.grammars import call_grammar, format_grammar
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import context_overflow

__all__ = [
    "ChoiceSampler",
    "SampledChoice",
    "answer_again",
    "bind_answer",
    "choose_sampling",
    "note_unheeded",
    "repeat_choices",
    "sample_as_asked",
]

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceSampler:
    """Samples the choices of one request."""

    engines: EngineRegistry
    policy: str
    renderer: PolicyRenderer
    request: CallRequest
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    transition_id: str
    session: str
    """Rollout and attempt."""
    _streamed: dict[int, tuple[GenerateRequest, CompletionText, int]] = field(
        default_factory=dict[int, tuple[GenerateRequest, CompletionText, int]]
    )
    """Choices that have begun, by index, with the policy's version."""

    async def whole(self) -> list[SampledChoice]:
        """All choices, in order."""
        if self.request.n == 1:
            return [await self._one_whole(0)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for index in range(self.request.n):
                    tasks.append(group.create_task(self._one_whole(index)))
                    await asyncio.sleep(0)  # a long prompt takes its time to be sent: others have their turn between
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first choice that failed says why the call did
        return [task.result() for task in tasks]

    async def stream(self) -> AsyncGenerator[TextDelta | SampledChoice, None]:
        """Deltas as they come, and each choice when it is whole."""
        if self.request.n == 1:
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
            for index in range(self.request.n):
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
        return [
            SampledChoice(
                id=call.id,
                completion=text.broken_off(shown[index]),
                version=version,
                sampling=call.sampling,
                last_delta=TextDelta(index=index),
            )
            for index, (call, text, version) in sorted(self._streamed.items())
            if index in shown
        ]

    def _place(self, index: int) -> tuple[GenerateRequest, CompletionText]:
        sampling = self.sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        text = CompletionText(self.renderer, self.prompt_ids, index=index, stop=sampling.stop, **_reading(self.request))
        call_id = f"{self.transition_id}-{index}" if index else self.transition_id
        return GenerateRequest(id=call_id, prompt_ids=self.prompt_ids, sampling=sampling, session=self.session), text

    async def _one_whole(self, index: int) -> SampledChoice:
        call, text = self._place(index)
        chunk = await self.engines.generate_whole(self.policy, call)
        return self._finished(call, text, chunk)

    async def _one(self, index: int) -> AsyncGenerator[TextDelta | SampledChoice, None]:
        call, text = self._place(index)
        async with aclosing(self.engines.generate(self.policy, call)) as chunks:
            async for chunk in chunks:
                self._streamed[index] = call, text, chunk.policy_version
                if chunk.finish_reason is not None:
                    yield self._finished(call, text, chunk)
                elif (delta := text.push(chunk.token_ids, chunk.logprobs, stream=True)) is not None:
                    yield delta

    def _finished(self, call: GenerateRequest, text: CompletionText, last: TokenChunk) -> SampledChoice:
        """The choice that ends with a chunk."""
        text.push(last.token_ids, last.logprobs, stream=False)
        if text.token_count == 0 or last.finish_reason is None:
            raise EngineUnavailable(
                f"the engine of policy {self.policy!r} returned a completion without a token or a finish reason"
            )
        completion, delta = text.finish(last.finish_reason)
        return SampledChoice(
            id=call.id, completion=completion, version=last.policy_version, sampling=call.sampling, last_delta=delta
        )


def choose_sampling(
    info: AttemptInfo,
    request: CallRequest,
    base: SamplingSettings,
    engine: EngineInfo,
    renderer: PolicyRenderer,
    prompt_tokens: int,
) -> SamplingSettings:
    """A call's settings: the rollout's or `default`, within what context and request allow. Raises ContextOverflow."""
    room = engine.context_length - prompt_tokens
    if room < 1:
        raise context_overflow(engine.context_length, str(prompt_tokens))
    stop_ids = (*base.stop_token_ids, *renderer.stop_token_ids, *request.extras.stop_token_ids)
    return replace(
        base,
        max_tokens=min(base.max_tokens, room, request.max_tokens or room),
        stop=tuple(dict.fromkeys((*base.stop, *request.stop))),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        seed=base.seed if base.seed is not None or info.branch is not None else request.seed,  # branches differ
    )


def sample_as_asked(request: CallRequest, base: SamplingSettings) -> SamplingSettings:
    """Settings of a call that belongs to no rollout: what the client says counts, else the recipe's. Raises Refusal."""
    asked = {**request.extras.asked, **request.asked}
    for name in asked.keys() - {"temperature", "top_p", "top_k"}:
        raise Refusal.at(name, "is not supported: this engine samples by temperature, top_p and top_k; leave it out")
    temperature, top_p = asked.get("temperature", base.temperature), asked.get("top_p", base.top_p)
    if temperature < 0:
        raise Refusal.at("temperature", f"is {temperature:g}; it must be at least 0")
    if not 0 < top_p <= 1:
        raise Refusal.at("top_p", f"is {top_p:g}; it must be above 0 and at most 1")
    return replace(
        base,
        temperature=temperature,
        top_p=top_p,
        top_k=int(asked.get("top_k", base.top_k)),
        max_tokens=request.max_tokens or base.max_tokens,
        seed=base.seed if request.seed is None else request.seed,
    )


def bind_answer(
    engines: EngineRegistry,
    request: CallRequest,
    engine: EngineInfo,
    renderer: PolicyRenderer,
    prompt_ids: Sequence[int],
) -> str:
    """The grammar that the call asks for; empty for none, or where engine or markup allow none (counted, said once)."""
    wanted, forced, tools = request.format, request.forced, request.tools or ()
    if wanted is None and forced is None:
        return ""
    grammar = None
    if engine.grammars and forced is not None:
        grammar = call_grammar(renderer, prompt_ids, tools, forced.name, several=request.parallel_tools)
    elif engine.grammars and wanted is not None:
        offered = tools if request.allow_tools else ()
        grammar = format_grammar(renderer, prompt_ids, wanted.schema, offered, several=request.parallel_tools)
    if grammar is not None:
        return grammar
    field = "tool_choice" if forced is not None or wanted is None else wanted.param
    if engines.note_ignored(engine.policy, [f"{field} as a bound of sampling"]):
        why = f"markup of its renderer {renderer.family!r}" if engine.grammars else "engine"
        logger.warning(
            "policy %r: its %s cannot bind answers, so that %s is shown to it, and a reward has to teach it to keep to "
            "that",
            *(engine.policy, why, field),
        )
    return ""


def note_unheeded(engines: EngineRegistry, policy: str, request: CallRequest, base: SamplingSettings) -> None:
    """Count what the call asks for and is not given: settings that the recipe decides, fields that nobody reads."""
    asked = {**request.extras.asked, **request.asked}
    overridden = [f"{name}={value:g}" for name, value in asked.items() if value != getattr(base, name, None)]
    if overridden:
        engines.note_overridden(policy, overridden)
    ignored = (*request.extras.ignored, *(f"tool {kind}" for kind in request.left_out))
    if ignored:
        engines.note_ignored(policy, ignored)


def answer_again(renderer: PolicyRenderer, request: CallRequest, stored: Sequence[CallRecord]) -> Answer:
    """The answer of a call that is in the store, as it was given the first time."""
    first = stored[0].transition
    return Answer(
        id=first.id,
        model=request.model,
        policy=first.policy,
        policy_version=first.policy_version,
        prompt_tokens=len(first.prompt_ids),
        cached_tokens=0,
        choices=_read_again(renderer, request, stored),
        created=int(first.started_at),
        sampling=first.sampling,
    )


def _read_again(renderer: PolicyRenderer, request: CallRequest, stored: Sequence[CallRecord]) -> tuple[Choice, ...]:
    """The choices of a recorded call, read as `request` wants them."""
    reading = _reading(request)
    return tuple(read_recorded(renderer, call.transition, index, reading) for index, call in enumerate(stored))


def repeat_choices(
    renderer: PolicyRenderer, request: CallRequest, recorded: Sequence[CallRecord], transition_id: str
) -> list[SampledChoice]:
    """The choices of a recorded call, for a new one that repeats it."""
    completions = _read_again(renderer, request, recorded)
    return [
        SampledChoice(
            id=f"{transition_id}-{index}" if index else transition_id,
            completion=completion,
            version=record.transition.policy_version,
            sampling=record.transition.sampling,
            last_delta=TextDelta(index=index),
            replayed_from=record.transition.id,
        )
        for index, (record, completion) in enumerate(zip(recorded, completions, strict=True))
    ]


def _reading(request: CallRequest) -> ToolReading:
    """The way in which the request wants its completions read."""
    return {
        "allow_tools": bool(request.tools) and request.allow_tools,
        "schemas": {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.tools or ()},
        "parallel_tools": request.parallel_tools,
    }
