"""A request as a dialect understood it, and its answer: the same for every dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from lightningrl.errors import LightningError
from lightningrl.types import SamplingSettings
from lightningrl_server.rendering.completion import Choice, ShownText, TextDelta

__all__ = [
    "CONTEXT_CODE",
    "Answer",
    "AnswerFormat",
    "AnswerStart",
    "CallContext",
    "CallRequest",
    "ContextEdit",
    "Delivery",
    "Extras",
    "FindAnswer",
    "ForcedCall",
    "HoldsAnswer",
    "Referring",
    "Refusal",
]

CONTEXT_CODE: Final = "context_length_exceeded"
"""The code for a prompt beyond the context, as OpenAI's SDKs know it."""
_LONGEST = 4000
"""Characters of a sentence."""


class Refusal(LightningError):
    """A call that is not answered with a completion."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if len(message) > _LONGEST:  # it quotes what was sent
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.details = details
        """Fields that a dialect's SDK reads beside the sentence."""
        self.request_id: str | None = None
        """Id of the refused call, which its answer's head has too."""

    @classmethod
    def at(cls, where: str, problem: str, *, field: str = "", code: str = "invalid_request") -> Self:
        """Refuse a part of the request: `where` begins the sentence and, with a `field` of it, is its `param`."""
        return cls(f"{where} {problem}", param=f"{where}{field}", code=code)


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The answer has to be a tool call: the markup that opens one stands at the end of the prompt, and the policy goes
    on from there. What was written for it is no part of the completion: it is neither sampled nor trained."""

    name: str | None = None
    """Which tool; None = one of those offered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """The answer has to be JSON: the policy is shown the format, and bound to it where its engine can."""

    param: str
    """Field of the request that asks for it."""
    schema: Mapping[str, Any]
    instruction: str
    """Sentence for the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextEdit:
    """An edit that the agent wants from some length on. Where it would change the prompt, the call is refused."""

    name: str
    beyond: int
    """Tokens of the longest prompt that it leaves as it is; -1 = it changes any."""


FindAnswer = Callable[[str], Mapping[str, Any] | None]
"""From the id of a transition to the message that it answered; None where the attempt has none."""
HoldsAnswer = Callable[[str], bool]
"""Asks if the conversation that a call goes on from by an id has the answer of this transition already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Referring:
    """Messages that name parts of the attempt's earlier answers instead of saying them again."""

    size: int
    """Characters of the others, at most."""
    read: Callable[[FindAnswer, HoldsAnswer], tuple[Mapping[str, Any], ...]]
    """All messages, normalised. Raises Refusal where one names what there is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Fields of a call beside those of its API."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For the chat template; they have to be the policy's own."""
    stop_token_ids: tuple[int, ...] = ()
    asked: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sampling settings that are the recipe's to decide, added to `CallRequest.asked`: `min_p`, penalties."""
    ignored: tuple[str, ...] = ()
    """Names that nobody reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """One call of a model, in our own terms."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    """Normalised: role, text content, `tool_calls` with parsed arguments, `tool_call_id`."""
    referring: Referring | None = None
    """Where the messages come from once the attempt is known; None = they are there."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    allow_tools: bool = True
    """False = the prompt names the tools but markup stays text (`tool_choice="none"`)."""
    parallel_tools: bool = True
    """False = only the first tool call of a completion is handed on."""
    forced: ForcedCall | None = None
    """None = the policy is free to call a tool or not."""
    format: AnswerFormat | None = None
    """None = plain text."""
    has_call_ids: bool = True
    """False = the API's tool calls have no ids, so a history is recognised without them."""
    failed_tools: Mapping[str, str] = field(default_factory=dict[str, str])
    """Results of which the request says that the tool failed, by tool-call id, as they were sent."""
    n: int = 1
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    asked: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wishes for the sampling that is the recipe's to decide: `temperature`, `top_p`."""
    edits: tuple[ContextEdit, ...] = ()
    left_out: tuple[str, ...] = ()
    """Types of tools that the agent offers and the policy does not read of."""
    extras: Extras = field(default_factory=Extras)
    previous: str | None = None
    """Transition whose conversation these messages go on with; None = they are all of it."""
    head: int | None = None
    """Number of the first messages (instructions) that hold for this call alone, where a later one may go on from here
    by its id. None = it is sent its whole history again, so nothing is kept for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """The headers that travel beside the body."""

    call_id: str | None = None
    """Stable over retries of one logical call (`x-lightningrl-call-id`)."""
    retries: int = 0
    """Times that the client sent this body before (`x-stainless-retry-count`)."""
    agent: str | None = None
    span_id: str | None = None
    body_digest: str = ""
    connection: str = ""
    """Address and port of the client, which sends its next call over it once it has the answer to the one before."""


@dataclass(slots=True, eq=False)
class Delivery:
    """The part of a streamed call that has been sent so far."""

    shown: dict[int, ShownText] = field(default_factory=dict[int, ShownText])
    """Text sent of each choice."""
    _sampled: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, delta: TextDelta, *, was_sent: bool, with_tool_calls: bool) -> None:
        """Count a delta; one that had nothing to show counts once a later one was sent."""
        tokens = self._sampled[delta.index] = self._sampled.get(delta.index, 0) + len(delta.token_ids)
        if was_sent:
            shown = self.shown.setdefault(delta.index, ShownText())
            shown.tokens = tokens
            shown.content += len(delta.content)
            shown.reasoning += len(delta.reasoning)
            shown.tool_calls += len(delta.tool_calls) if with_tool_calls else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerStart:
    """A streamed call has its place; text follows."""

    id: str
    """Transition id of the first choice."""
    policy: str
    created: int
    """Unix seconds."""
    prompt_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A recorded call."""

    id: str
    """Transition id of the first choice."""
    model: str
    policy: str
    policy_version: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken over from an earlier call."""
    choices: tuple[Choice, ...]
    created: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    @property
    def start(self) -> AnswerStart:
        """Its beginning, for an answer that was recorded before and is streamed now."""
        return AnswerStart(
            id=self.id,
            policy=self.policy,
            created=self.created,
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
        )
