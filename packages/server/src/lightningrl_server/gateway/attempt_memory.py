"""Memory of the attempts in progress: earlier calls, their retries, tools asked for, a branch's replay.

call ─► AttemptMemories.find ─► AttemptMemory      read from the store where this process was not there
record ─► AttemptMemory.remember
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.types import Transition
from lightningrl_server.gateway.asked_tools import AskedTools, ShownTool
from lightningrl_server.gateway.choices import SampledChoice
from lightningrl_server.gateway.history import Conversation, History, offered_tools
from lightningrl_server.gateway.prompt import LONG, AnsweredPrompt, Prompt, Threads
from lightningrl_server.gateway.replay import Replay
from lightningrl_server.gateway.request import Answer, CallContext, CallRequest
from lightningrl_server.records import AttemptInfo, CallRecord, ToolCallRecord
from lightningrl_server.rendering.completion import Choice, read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import CallLog

__all__ = ["AttemptMemories", "AttemptMemory", "GivenAnswer", "PolicyCall", "Retries"]

logger = logging.getLogger(__name__)

GivenAnswer = Answer | tuple[CallRecord, ...]
"""An answer of this process, or the choices that the store has of an earlier one."""


class Retries:
    """The logical calls of one attempt: each is recorded once, and its retries are answered with what was recorded. A
    client tells a retry by a stable call id, or (OpenAI's and Anthropic's SDKs) by how often it sent the body."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._done: dict[str, GivenAnswer] = {}
        self._keys: defaultdict[str, list[str]] = defaultdict(list)
        """Calls by their body."""
        self._failed: Counter[str] = Counter()
        self._unseen: defaultdict[str, list[str]] = defaultdict(list)
        """Answers by body whose client left before they were sent. The body's next call is a retry, said or not."""
        self._sent: defaultdict[str, list[str]] = defaultdict(list)
        """Answered calls by connection: whose next call comes over it has the answer, and retries another one."""

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """Take over what the store has, as after a restart of the server."""
        choices: defaultdict[str, list[CallRecord]] = defaultdict(list)
        for call in calls:
            choices[call.call_key.partition("#")[0]].append(call)
        for key, recorded in choices.items():
            if key in self._open or key in self._done:
                continue  # it is answered here
            self._done[key] = tuple(recorded)
            self._keys[_body_of(key)].append(key)

    async def begin(self, context: CallContext) -> tuple[str, GivenAnswer | None]:
        """The call's key, and its answer if it has one. Waits for a first try that is still running."""
        for key in self._sent.pop(context.connection, ()) if context.connection else ():
            keys = self._keys[_body_of(key)]
            if key in keys:
                keys.remove(key)
        given = context.call_id
        key = self._key_of_body(context) if given is None else f"id:{given.replace('#', '-')}"
        while key in self._open:
            await self._open[key].wait()
        answer = self._done.get(key)
        if answer is None:
            self._open[key] = asyncio.Event()
        return key, answer

    def end(self, key: str, answer: GivenAnswer | None, connection: str = "") -> None:
        """The call is answered, or failed (None): its retry is then a first try."""
        running = self._open.pop(key, None)
        if running is not None:
            running.set()
        if answer is not None:
            self._done[key] = answer
            self._sent[connection].append(key)
        elif key not in self._done:
            self._failed[_body_of(key)] += 1

    def keep(self, key: str, answer: GivenAnswer, *, was_shown: bool = False) -> None:
        """Answer a retry of the call with this; where nobody saw it, also the next call of the same body."""
        self._done[key] = answer
        if not was_shown:
            self._unseen[_body_of(key)].append(key)

    def _key_of_body(self, context: CallContext) -> str:
        # Without an id, tries are told apart by their count alone. Two calls of one body, the first of which fails:
        #     body, retries=0  ─► A, fails           body, retries=0  ─► B, answered
        #     body, retries=1  ─► a failed try is owed (`_failed`), so it is a first try: C, not the answer of B
        #     body, retries=1  ─► none is owed any more: the answer of the latest, C
        body = context.body_digest
        if self._unseen[body]:
            return self._unseen[body].pop()
        if context.retries and self._failed[body]:
            self._failed[body] -= 1
        elif context.retries and self._keys[body]:
            return self._keys[body][-1]
        key = f"{body}-{token_hex(4)}"
        self._keys[body].append(key)
        return key


def _body_of(key: str) -> str:
    return key.rpartition("-")[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyCall:
    """A call that a policy answers, on its way."""

    info: AttemptInfo
    request: CallRequest
    context: CallContext
    policy: str
    renderer: PolicyRenderer
    memory: AttemptMemory
    key: str
    """Its own, over all its retries."""
    is_trainable: bool
    fits: tuple[str, ...]
    """Patterns of the policy that its first system message fits."""
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, eq=False)
class AttemptMemory:
    """An attempt in progress, as this process remembers it. Other servers of the store may have recorded more."""

    _place: tuple[str, int]
    """Rollout and number."""
    _log: CallLog
    _threads: Threads
    _renderers: Mapping[str, PolicyRenderer]
    replay: Replay | None
    """None = the attempt is no branch."""
    history: History = field(default_factory=History)
    retries: Retries = field(default_factory=Retries)
    _asked: AskedTools | None = None
    """None = no answer asked for a tool."""
    _calls: set[str] = field(default_factory=set[str])
    """Ids of the transitions that all of this stands for."""

    @property
    def calls(self) -> int:
        """Number of the recorded calls that it knows."""
        return len(self._calls)

    def restore(self, recorded: Sequence[CallRecord]) -> None:
        """Take over recorded calls that are new to this process."""
        new = [call for call in recorded if call.transition.id not in self._calls]
        self._calls.update(call.transition.id for call in new)
        self.history.restore(new)
        self.retries.restore(new)
        if any(call.transition.tool_call_ids for call in new):
            self._asked_tools().restore(new)
        if self.replay is not None:
            self.replay.restore(new)

    async def keep(
        self, call: PolicyCall, prompt: Prompt, choices: Sequence[SampledChoice], key: str, duration_s: float
    ) -> tuple[CallRecord, ...]:
        """Record the choices, then remember them; returns those in the store where this is a replay."""
        request = call.request
        answers = [prompt.answer(choice.id, choice.completion, with_ids=request.has_call_ids) for choice in choices]
        pairs = zip(choices, answers, strict=True)
        records = [_record(call, prompt, choice, answer, key, duration_s) for choice, answer in pairs]
        shown = [] if self._asked is None else self._asked.find(request, prompt.parent_id)
        before = await self._log.append_calls(records, await self._read_shown(shown) if shown else ())
        if self._asked is not None:
            self._asked.settle(shown)
        stored = tuple(record for record in before if record is not None)
        if not stored:
            for choice, answer, record in zip(choices, answers, records, strict=True):
                self._remember(request, prompt, choice, answer, record.transition)
        return stored

    async def keep_shown(self, request: CallRequest) -> None:
        """Record the results of tools that a request brought which is not answered."""
        shown = [] if self._asked is None else self._asked.find(request)
        if self._asked is None or not shown:
            return
        try:
            await self._log.append_tool_calls(*self._place, await self._read_shown(shown))
        except StoreError as error:  # the agent is told already that its call failed
            logger.info("rollout %s, attempt %s: results of tools are not recorded: %s", *self._place, error)
        else:
            self._asked.settle(shown)

    def _remember(
        self, request: CallRequest, prompt: Prompt, choice: SampledChoice, answer: AnsweredPrompt, recorded: Transition
    ) -> None:
        self._calls.add(choice.id)
        if choice.completion.tool_calls:
            self._asked_tools().add(recorded, choice.completion.tool_calls, request.messages)
        self.history.add(answer.call, prompt.digest, answer.digest)
        if prompt.head is not None:
            self.history.add_conversation(
                Conversation(
                    call=answer.call,
                    digest=answer.digest,
                    head=prompt.head,
                    added=(*request.messages[request.head or 0 :], _message(choice.completion)),
                    previous=request.previous,
                    parent=prompt.parent_id or request.previous,
                )
            )

    async def resolve(self, request: CallRequest) -> CallRequest:
        """The call with the parts of earlier answers that it names in their places. Raises Refusal."""
        referring = request.referring
        if referring is None:
            return request

        def find(transition_id: str) -> Mapping[str, Any] | None:
            return self.history.answer(transition_id, self._read)

        def holds(transition_id: str) -> bool:
            return self.history.holds(request.previous, transition_id)

        messages = await self._threads.run(referring.size, lambda: referring.read(find, holds))
        return replace(request, messages=messages, referring=None)

    async def _read_shown(self, shown: Sequence[ShownTool]) -> list[ToolCallRecord]:
        """Records of the tools; read beside the event loop where arguments are checked."""
        size = LONG if any(tool.complains for tool in shown) else 0
        return await self._threads.run(size, lambda: [tool.record() for tool in shown])

    def _asked_tools(self) -> AskedTools:
        if self._asked is None:
            self._asked = AskedTools(self._renderers)
        return self._asked

    def _read(self, transition: Transition) -> Mapping[str, Any]:
        return _message(read_recorded(self._renderers[transition.policy], transition))


class AttemptMemories:
    """The memories of a server's attempts. Those that never say goodbye are dropped, oldest first."""

    def __init__(self, log: CallLog, threads: Threads, renderers: Mapping[str, PolicyRenderer], *, most: int) -> None:
        self._log = log
        self._threads = threads
        self._renderers = renderers
        self._most = most
        self._attempts: OrderedDict[tuple[str, int], AttemptMemory] = OrderedDict()

    async def find(self, info: AttemptInfo) -> AttemptMemory:
        """The attempt's memory, with all that the store had when its call was let in."""
        place = (info.rollout_id, info.attempt)
        memory = self._attempts.get(place)
        if memory is None:
            point, replay = info.branch, None
            if point is not None:
                replay = Replay(await self._log.calls(point.rollout_id, point.attempt), point.calls)
            memory = AttemptMemory(place, self._log, self._threads, self._renderers, replay)
            memory = self._attempts.setdefault(place, memory)
            if len(self._attempts) > self._most:
                self._attempts.popitem(last=False)
        self._attempts.move_to_end(place)
        if memory.calls < info.calls:  # answered by another server, or before the memory was dropped
            memory.restore(await self._log.calls(*place))
        return memory

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free an ended attempt's memory."""
        self._attempts.pop((rollout_id, attempt), None)


def _message(choice: Choice) -> dict[str, Any]:
    """The message of an answer, reasoning included."""
    return choice.as_message() | ({"reasoning_content": choice.reasoning} if choice.reasoning else {})


def _record(
    call: PolicyCall, prompt: Prompt, choice: SampledChoice, answer: AnsweredPrompt, key: str, duration_s: float
) -> CallRecord:
    completion = choice.completion
    transition = Transition(
        id=choice.id,
        policy=call.policy,
        policy_version=choice.version,
        prompt_ids=prompt.array,
        completion_ids=answer.call.completion_ids,
        logprobs=np.asarray(completion.logprobs, dtype=np.float32),
        finish_reason=completion.finish_reason,
        parent_id=prompt.parent_id,
        is_break=prompt.is_break,
        sampling=choice.sampling,
        agent=call.context.agent,
        span_id=call.context.span_id,
        tool_call_ids=tuple(tool.id for tool in completion.tool_calls),
        malformed=completion.malformed,
        offered=offered_tools(call.request.tools) if call.request.tools else "",
        fits=call.fits,
        trainable=choice.replayed_from is None and call.is_trainable,
        replayed_from=choice.replayed_from,
        started_at=call.started,
        duration_s=duration_s,
    )
    return CallRecord(
        rollout_id=call.info.rollout_id,
        attempt=call.info.attempt,
        call_key=f"{key}#{completion.index}" if completion.index else key,
        transition=transition,
        history_key=answer.key,
    )
