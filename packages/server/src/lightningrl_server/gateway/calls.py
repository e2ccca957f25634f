"""The way of one call: who asks, which tokens, which engine, recorded, answered.

request ─► prompt (rendered, or bridged from an earlier call) ─► engine ─► choices ─► store (durable) ─► Answer
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable, StoreError
from lightningrl.records import AttemptInfo, CallRecord, ToolCallRecord
from lightningrl.types import EngineInfo, SamplingSettings, Transition
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.asked_tools import AskedTools, ShownTool
from lightningrl_server.gateway.choices import ChoiceSampler, SampledChoice
from lightningrl_server.gateway.conversations import Conversation, Conversations
from lightningrl_server.gateway.errors import CONTEXT_CODE, Refusal
from lightningrl_server.gateway.history import History, PastCall, as_ids, extend_digest, history_key, offered_tools
from lightningrl_server.gateway.prompts import Prompt, PromptBuilder
from lightningrl_server.gateway.replay import Replay
from lightningrl_server.gateway.request import Answer, AnswerStart, CallContext, CallRequest, Delivery
from lightningrl_server.gateway.retries import Retries
from lightningrl_server.gateway.routing import Routing, fitting_patterns
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.gateway.threads import LONG, Threads
from lightningrl_server.gateway.watch import CallWatch
from lightningrl_server.rendering.completion import Choice, CompletionText, TextDelta, read_recorded
from lightningrl_server.rendering.renderer import PROMPT_TAIL, PolicyRenderer
from lightningrl_server.rendering.tokenizer import context_overflow
from lightningrl_server.store.errors import AttemptOver, StoreFull
from lightningrl_server.store.protocol import CallLog

__all__ = ["PolicyCalls", "answer_again"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt in progress, as we remember it."""

    asked: AskedTools
    history: History = field(default_factory=History)
    conversations: Conversations = field(default_factory=Conversations)
    retries: Retries = field(default_factory=Retries)
    replay: Replay | None = None
    """Of a branch."""
    known: set[str] = field(default_factory=set[str])
    """Transitions that all of this stands for. Other servers of the store may have recorded more."""

    def add(self, recorded: Sequence[CallRecord]) -> None:
        """Those that are not known yet."""
        new = [call for call in recorded if call.transition.id not in self.known]
        self.known.update(call.transition.id for call in new)
        self.history.restore(new)
        self.conversations.restore(new)
        self.retries.restore(new)
        self.asked.restore(new)
        if self.replay is not None:
            self.replay.restore(new)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """One call on its way."""

    info: AttemptInfo
    request: CallRequest
    context: CallContext
    policy: str
    renderer: PolicyRenderer
    attempt: _Attempt
    key: str
    delivery: Delivery
    offered: str
    """Its tools, as they are kept."""
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)


class PolicyCalls:
    """Makes calls for attempts. One per server, inside its event loop."""

    def __init__(
        self,
        log: CallLog,
        engines: EngineRegistry,
        renderers: Mapping[str, PolicyRenderer],
        settings: GatewaySettings,
        threads: Threads,
        watch: CallWatch | None = None,
    ) -> None:
        self._log = log
        self._watch = watch
        self._threads = threads
        self._prompts = PromptBuilder(threads)
        self._engines = engines
        self._renderers = dict(renderers)
        self._settings = settings
        self._routing = Routing(tuple(renderers), default=settings.default_policy, agents=settings.agents, rules=settings.roles)
        prefix = secrets.token_hex(4)
        self._ids = (f"{prefix}{number:x}" for number in count())
        """Unique in the run, also after a restart of the server."""
        self._left_out: set[str] = set()
        """Types of tools that were warned of."""
        self._attempts: OrderedDict[tuple[str, int], _Attempt] = OrderedDict()

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self._renderers)

    def renderer(self, policy: str) -> PolicyRenderer:
        return self._renderers[policy]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free an ended attempt's memory."""
        self._attempts.pop((rollout_id, attempt), None)

    async def authorise(self, rollout_id: str, attempt: int, key: str) -> AttemptInfo:
        """The attempt a scoped key stands for; raises Refusal."""
        if attempt < 2**63:
            info = await self._log.authorise(rollout_id, attempt, key)
            if info is not None:
                return info
            reason = await self._log.refusal(rollout_id, attempt, key)
            if isinstance(reason, AttemptOver):
                raise Refusal(str(reason), status=410, code="attempt_over")
        raise Refusal(  # one answer, whether there is such a rollout or not: who has no key need not know
            f"wrong key for attempt {attempt} of rollout {rollout_id!r}; use the key of its lease", status=401, code="invalid_api_key"
        )

    async def run(
        self, info: AttemptInfo, request: CallRequest, context: CallContext, delivery: Delivery | None = None
    ) -> AsyncGenerator[AnswerStart | TextDelta | Answer, None]:
        """Text as it comes where `request.stream`, then the recorded answer. Raises Refusal before the first item. Where a stream is
        left early, what its `delivery` says was sent by then is recorded."""
        attempt = await self._attempt(info)
        request = await self._say_referred(attempt, request)
        context, policy, renderer = self._route(request, context)
        key, kept = await attempt.retries.begin(context)
        try:
            if kept is None:
                call = _Call(
                    info=info,
                    request=request,
                    context=context,
                    policy=policy,
                    renderer=renderer,
                    attempt=attempt,
                    key=key,
                    delivery=delivery or Delivery(),
                    offered=offered_tools(request.tools),
                )
                async with aclosing(self._sample(call)) as items:
                    async for item in items:
                        if isinstance(item, Answer):
                            kept = item
                        yield item
            else:
                yield kept if isinstance(kept, Answer) else answer_again(renderer, request, kept)
        except GeneratorExit:  # the client left before it was sent the answer
            if kept is not None and not request.stream:
                attempt.retries.keep_unseen(key, kept)
            raise
        except ContextOverflow as error:
            await self._keep_shown(info, attempt, request)
            raise _over_long(error) from error
        except EngineUnavailable as error:
            await self._keep_shown(info, attempt, request)
            raise Refusal(str(error), status=503, code="engine_unavailable") from error
        except BackendError as error:
            await self._keep_shown(info, attempt, request)
            raise Refusal(str(error), status=502, code="engine_failed") from error
        except AttemptOver as error:
            raise Refusal(str(error), status=410, code="attempt_over") from error
        except StoreFull as error:
            raise Refusal(str(error), status=503, code="store_full") from error
        except StoreError as error:
            raise Refusal(f"the call could not be recorded: {error}", status=503, code="store_error") from error
        finally:
            attempt.retries.end(key, kept)

    async def count_tokens(self, info: AttemptInfo, request: CallRequest, context: CallContext) -> int:
        """How long the call's prompt is. Nothing is sampled or recorded."""
        attempt = await self._attempt(info)
        request = await self._say_referred(attempt, request)
        context, policy, renderer = self._route(request, context)
        context_length = self._engines.context_length(policy)
        try:
            prompt = await self._prompts.build(attempt.history, attempt.conversations, request, policy, renderer, context_length)
        except ContextOverflow as error:
            raise _over_long(error) from error
        _refuse_edits(request, len(prompt.ids))
        return len(prompt.ids)

    async def _sample(self, call: _Call) -> AsyncGenerator[AnswerStart | TextDelta | Answer, None]:
        request, policy = call.request, call.policy
        engine = await self._engines.info(policy)
        prompt = await self._prompts.build(
            call.attempt.history, call.attempt.conversations, request, policy, call.renderer, engine.context_length
        )
        _refuse_edits(request, len(prompt.ids))
        recorded = () if call.attempt.replay is None else call.attempt.replay.take(policy, prompt.array, request, call.renderer)
        if recorded:
            yield await self._repeat(call, prompt, recorded)
            return
        sampling = self._sampling(call.info, request, engine, call.renderer, len(prompt.ids))
        transition_id = self._next_id(call.info)
        sampler = ChoiceSampler(self._engines, policy, call.renderer, request, prompt.ids, sampling, transition_id)
        choices: list[SampledChoice] = []
        has_begun = False
        if request.stream:
            yield AnswerStart(id=transition_id, policy=policy, created=int(call.started), prompt_tokens=len(prompt.ids))
            try:
                async with aclosing(sampler.stream()) as items:
                    async for item in items:
                        if isinstance(item, SampledChoice):
                            choices.append(item)
                        else:
                            has_begun = True
                            yield item
            except (GeneratorExit, asyncio.CancelledError):
                await self._keep_broken_off(call, prompt, sampler)
                raise
        else:
            choices = await sampler.whole()
        choices.sort(key=lambda choice: choice.completion.index)
        answer, is_replay = await self._commit(call, prompt, choices, was_shown=has_begun)
        if is_replay and has_begun:
            raise Refusal(
                f"the call id {call.context.call_id!r} was answered before; send each call with its own", status=409, code="replayed"
            )
        if request.stream and not is_replay:
            for choice in choices:
                yield choice.last_delta
        yield answer

    async def _repeat(self, call: _Call, prompt: Prompt, recorded: tuple[CallRecord, ...]) -> Answer:
        """Answer a call of a branch as it was answered in the recorded rollout."""
        transition_id = self._next_id(call.info)
        choices = [
            SampledChoice(
                id=f"{transition_id}-{index}" if index else transition_id,
                completion=completion,
                version=record.transition.policy_version,
                sampling=record.transition.sampling,
                last_delta=TextDelta(index=index),
                replayed_from=record.transition.id,
            )
            for index, (record, completion) in enumerate(zip(recorded, _read_again(call.renderer, call.request, recorded), strict=True))
        ]
        try:
            answer, _ = await self._commit(call, prompt, choices, was_shown=False)
        except StoreError:
            assert call.attempt.replay is not None
            call.attempt.replay.put_back(recorded)
            raise
        return answer

    def _next_id(self, info: AttemptInfo) -> str:
        return f"{info.rollout_id}/{info.attempt}/{next(self._ids)}"

    async def _commit(self, call: _Call, prompt: Prompt, choices: Sequence[SampledChoice], *, was_shown: bool) -> tuple[Answer, bool]:
        """Record the call: its answer, and whether it is that of an earlier call. `was_shown`: the agent saw its text already."""
        # From here on the call exists whether or not the client still listens: memory and store must agree.
        keeping = asyncio.ensure_future(self._keep(call, prompt, choices, call.key))
        try:
            stored = await asyncio.shield(keeping)
        except asyncio.CancelledError:  # the client left meanwhile: a retry of the call is given what nobody saw
            answer = _answer(call, prompt, choices, await keeping)
            (call.attempt.retries.keep if was_shown else call.attempt.retries.keep_unseen)(call.key, answer)
            raise
        return _answer(call, prompt, choices, stored), bool(stored)

    async def _keep_broken_off(self, call: _Call, prompt: Prompt, sampler: ChoiceSampler) -> None:
        """Record what an agent was shown before it left the stream, as a call of its own: a retry is a first try."""
        choices = sampler.broken_off(call.delivery.shown)
        if not choices:
            return
        try:
            await self._keep(call, prompt, choices, f"broken:{choices[0].id}")
        except StoreError as error:  # the attempt has ended with the stream: its outcome is decided
            logger.info("rollout %s, attempt %s: a broken-off stream is not recorded: %s", call.info.rollout_id, call.info.attempt, error)

    def may_serve(self, model: str, context: CallContext) -> bool:
        """Whether a policy may answer a call, by what is known before its messages are read."""
        return self._routing.may_serve(model, context.agent)

    def _route(self, request: CallRequest, context: CallContext) -> tuple[CallContext, str, PolicyRenderer]:
        """The call's role, and the policy that answers it. Raises Refusal."""
        role = self._routing.role(context.agent, request.model, request.messages)
        name = self._routing.policy(request.model, role)
        if name is None:
            asked = f"no policy {request.model!r} in this run" + (f", none for the role {role!r}" if role is not None else "")
            raise Refusal(
                f"{asked}, and no default policy; it serves {', '.join(sorted(self._renderers))}. "
                "To have other models answered by your provider, configure [upstream] base_url and api_key_env in the recipe",
                status=404,
                code="model_not_found",
                param="model",
            )
        renderer = self._renderers[name]
        if request.tools and not renderer.supports_tools:
            raise Refusal(renderer.without_tools, param="tools")
        _check_kwargs(name, renderer, request.extras.template_kwargs)
        return context if role == context.agent else replace(context, agent=role), name, renderer

    async def _attempt(self, info: AttemptInfo) -> _Attempt:
        place = (info.rollout_id, info.attempt)
        attempt = self._attempts.get(place)
        if attempt is None:
            attempt = _Attempt(asked=AskedTools(self._renderers))
            if info.branch is not None:
                point = info.branch
                attempt.replay = Replay(await self._log.calls(point.rollout_id, point.attempt), point.calls)
            attempt = self._attempts.setdefault(place, attempt)
            if len(self._attempts) > self._settings.max_attempts_in_memory:
                self._attempts.popitem(last=False)
        self._attempts.move_to_end(place)
        if len(attempt.known) < info.calls:  # answered by an earlier server or another one, or before its memory was dropped
            attempt.add(await self._log.calls(*place))
        return attempt

    async def _say_referred(self, attempt: _Attempt, request: CallRequest) -> CallRequest:
        """The call with the parts of earlier answers that it names in their places. Raises Refusal."""
        referring = request.referring
        if referring is None:
            return request

        def find(transition_id: str) -> Mapping[str, Any] | None:
            return attempt.conversations.answer(transition_id, self._read_said)

        def holds(transition_id: str) -> bool:
            return attempt.conversations.holds(request.previous, transition_id)

        return replace(request, messages=await self._threads.run(referring.size, lambda: referring.read(find, holds)), referring=None)

    def _read_said(self, transition: Transition) -> Mapping[str, Any]:
        return _said(read_recorded(self._renderers[transition.policy], transition))

    def _sampling(
        self, info: AttemptInfo, request: CallRequest, engine: EngineInfo, renderer: PolicyRenderer, prompt_tokens: int
    ) -> SamplingSettings:
        base = info.sampling or self._settings.sampling.get(engine.policy) or SamplingSettings()
        room = engine.context_length - prompt_tokens
        if room < 1:
            raise context_overflow(engine.context_length, str(prompt_tokens))
        asked = {**request.asked, **request.extras.asked}
        self._engines.note_overridden(
            engine.policy, (f"{name}={value:g}" for name, value in asked.items() if value != getattr(base, name, None))
        )
        self._engines.note_ignored(engine.policy, (*request.extras.ignored, *(f"tool {kind}" for kind in request.left_out)))
        self._note_left_out(request)
        return replace(
            base,
            max_tokens=min(base.max_tokens, room, request.max_tokens or room),
            stop=tuple(dict.fromkeys((*base.stop, *request.stop))),
            stop_token_ids=tuple(dict.fromkeys((*base.stop_token_ids, *renderer.stop_token_ids, *request.extras.stop_token_ids))),
            seed=base.seed if base.seed is not None or info.branch is not None else request.seed,  # branches differ from each other
        )

    def _note_left_out(self, request: CallRequest) -> None:
        for kind in request.left_out:
            if kind not in self._left_out:
                self._left_out.add(kind)
                logger.warning("agents offer the provider's tool %r; the policy is not told of it, as the recipe says", kind)

    def _record(self, call: _Call, prompt: Prompt, choice: SampledChoice, key: str, duration: float) -> CallRecord:
        policy, index = call.policy, choice.completion.index
        answer = extend_digest(prompt.digest, choice.completion.as_message(with_ids=call.request.has_call_ids))
        trainable = self._settings.trainable
        transition = Transition(
            id=choice.id,
            policy=policy,
            policy_version=choice.version,
            prompt_ids=prompt.array,
            completion_ids=as_ids(choice.completion.token_ids),
            logprobs=np.asarray(choice.completion.logprobs, dtype=np.float32),
            finish_reason=choice.completion.finish_reason,
            parent_id=prompt.parent_id,
            is_break=prompt.is_break,
            sampling=choice.sampling,
            agent=call.context.agent,
            span_id=call.context.span_id,
            tool_call_ids=tuple(asked.id for asked in choice.completion.tool_calls),
            offered=call.offered,
            fits=fitting_patterns(self._settings.system_patterns.get(policy, ()), call.request.messages),
            trainable=choice.replayed_from is None and (trainable is None or policy in trainable),
            replayed_from=choice.replayed_from,
            started_at=call.started,
            duration_s=duration,
        )
        return CallRecord(
            rollout_id=call.info.rollout_id,
            attempt=call.info.attempt,
            call_key=key if index == 0 else f"{key}#{index}",
            transition=transition,
            history_key=history_key(prompt.digest, answer, prompt.tools, prompt.head),
        )

    async def _keep(self, call: _Call, prompt: Prompt, choices: Sequence[SampledChoice], key: str) -> tuple[CallRecord, ...]:
        """Record the choices, then remember them; returns those kept before where this is a replay."""
        duration = time.perf_counter() - call.clock
        records = [self._record(call, prompt, choice, key, duration) for choice in choices]
        shown = call.attempt.asked.find(call.request, prompt.parent_id)
        kept_before = await self._log.append_calls(records, await self._read_shown(shown))
        call.attempt.asked.settle(shown)
        stored = tuple(kept for kept in kept_before if kept is not None)
        if stored:
            return stored
        if self._watch is not None:
            self._watch.answered(call.policy, duration, len(prompt.ids), sum(len(choice.completion.token_ids) for choice in choices))
        for choice, record in zip(choices, records, strict=True):
            call.attempt.known.add(choice.id)
            call.attempt.asked.add(record.transition, choice.completion.tool_calls, call.request.messages)
            answer = extend_digest(prompt.digest, choice.completion.as_message(with_ids=call.request.has_call_ids))
            past = PastCall(choice.id, prompt.array, as_ids(choice.completion.token_ids), prompt.tools)
            call.attempt.history.add(past, prompt.digest, answer)
            if prompt.head is not None:
                call.attempt.conversations.add(
                    Conversation(
                        call=past,
                        digest=answer,
                        head=prompt.head,
                        added=(*call.request.messages[call.request.head or 0 :], _said(choice.completion)),
                        previous=call.request.previous,
                        parent=prompt.parent_id or call.request.previous,
                    )
                )
        return ()

    async def _read_shown(self, shown: Sequence[ShownTool]) -> list[ToolCallRecord]:
        """Beside the event loop where arguments are checked."""
        size = LONG if any(tool.complains for tool in shown) else 0
        return await self._threads.run(size, lambda: [tool.record() for tool in shown])

    async def _keep_shown(self, info: AttemptInfo, attempt: _Attempt, request: CallRequest) -> None:
        """Record the results of tools that a request brought which is not answered."""
        shown = attempt.asked.find(request)
        if not shown:
            return
        try:
            await self._log.append_tool_calls(info.rollout_id, info.attempt, await self._read_shown(shown))
        except StoreError as error:  # the agent is told already that its call failed
            logger.info("rollout %s, attempt %s: results of tools are not recorded: %s", info.rollout_id, info.attempt, error)
        else:
            attempt.asked.settle(shown)


def _said(choice: Choice) -> dict[str, Any]:
    """The message of an answer, reasoning included."""
    return choice.as_message() | ({"reasoning_content": choice.reasoning} if choice.reasoning else {})


def _answer(call: _Call, prompt: Prompt, choices: Sequence[SampledChoice], stored: Sequence[CallRecord]) -> Answer:
    """The answer as it was sampled, or (`stored`) as it was given before."""
    if stored:
        return answer_again(call.renderer, call.request, stored)
    return Answer(
        id=choices[0].id,
        model=call.request.model,
        policy=call.policy,
        policy_version=choices[0].version,
        prompt_tokens=len(prompt.ids),
        cached_tokens=prompt.suffix_start,
        choices=tuple(choice.completion for choice in choices),
        created=int(call.started),
    )


def _refuse_edits(request: CallRequest, prompt_tokens: int) -> None:
    """Raises Refusal where an edit would change the prompt: the policy would learn from one that the agent did not write."""
    for edit in request.edits:
        if prompt_tokens > edit.beyond:
            raise Refusal(
                f"context_management asks for {edit.name!r}, which would now change the prompt of {prompt_tokens} tokens, and that is not "
                "supported: the policy would learn from a prompt that the agent did not write; keep more or trigger it later, or shorten "
                "the messages yourself",
                param="context_management",
            )


def _check_kwargs(policy: str, renderer: PolicyRenderer, kwargs: Mapping[str, Any]) -> None:
    """Raises Refusal where a call wants its prompt made otherwise than the policy's prompts are."""
    for name in renderer.unlike(kwargs):
        raise Refusal(
            f"chat_template_kwargs asks for {name}={kwargs[name]!r}, and the prompts of policy {policy!r} are made otherwise; "
            f"set {name} under policy.chat_template_kwargs in the recipe, or leave it out",
            param="chat_template_kwargs",
        )


def _over_long(error: ContextOverflow) -> Refusal:
    return Refusal(str(error), code=CONTEXT_CODE, param="messages")


def answer_again(renderer: PolicyRenderer, request: CallRequest, stored: Sequence[CallRecord]) -> Answer:
    """The answer of a call that the store kept, as it was given the first time."""
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
    )


def _read_again(renderer: PolicyRenderer, request: CallRequest, stored: Sequence[CallRecord]) -> tuple[Choice, ...]:
    choices = []
    for index, call in enumerate(stored):
        kept = call.transition
        text = CompletionText(
            renderer,
            kept.prompt_ids[-PROMPT_TAIL:].tolist(),
            index=index,
            allow_tools=bool(request.tools) and request.allow_tools,
            schemas=request.schemas,
            parallel_tools=request.parallel_tools,
            stop=kept.sampling.stop,
            tool_call_ids=kept.tool_call_ids,
        )
        text.push(kept.completion_ids.tolist(), kept.logprobs.tolist(), stream=False)
        choices.append(text.finish(kept.finish_reason)[0])
    return tuple(choices)
