"""How an attempt ended, and how an exception becomes an outcome."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.tracing.scope import ActiveRollout
from lightningrl.types import Outcome

__all__ = ["AttemptReport", "report_exception", "report_output"]

CONTEXT_CODE: Final = "context_length_exceeded"
LONGEST_ERROR: Final = 4_000
FRAMES: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptReport:
    """The result of an attempt."""

    outcome: Outcome
    output: Any = None
    """What the agent returned (JSON)."""
    error: str | None = None
    duration_s: float = 0.0


def report_output(output: Any, *, agent: str, duration_s: float) -> AttemptReport:
    """A success, unless the agent returned nothing or something that is not JSON."""
    if output is None:
        error = f"the agent {agent!r} returned nothing; return its answer, which the reward looks at"
        return AttemptReport(outcome=Outcome.AGENT_ERROR, error=error, duration_s=duration_s)
    try:
        json.dumps(output, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        error = f"the agent {agent!r} returned a {type(output).__name__} that is not JSON ({problem}); return text, numbers, lists or dicts"
        return AttemptReport(outcome=Outcome.AGENT_ERROR, error=error, duration_s=duration_s)
    return AttemptReport(outcome=Outcome.SUCCEEDED, output=output, duration_s=duration_s)


def report_exception(error: BaseException, rollout: ActiveRollout, *, duration_s: float) -> AttemptReport:
    """Whose failure it is: the gateway's (unreachable, 503), the context's length, or else the agent's."""
    causes = list(iterate_causes(error))
    if any(is_context_overflow(cause) for cause in causes):
        outcome = Outcome.CONTEXT_OVERFLOW
    elif any(cause in rollout.connection_errors or status_of(cause) in {502, 503, 504} for cause in causes):
        outcome = Outcome.INFRASTRUCTURE_ERROR
    else:
        outcome = Outcome.AGENT_ERROR
    return AttemptReport(outcome=outcome, error=describe(error), duration_s=duration_s)


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what led to it, members of groups included, each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions


def status_of(error: BaseException) -> int | None:
    """HTTP status that an SDK's exception carries."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_context_overflow(error: BaseException) -> bool:
    if getattr(error, "code", None) == CONTEXT_CODE:
        return True
    if CONTEXT_CODE in str(error):
        return True
    text = getattr(getattr(error, "response", None), "_content", b"")  # httpx and requests: the answer's body, if it was read
    return isinstance(text, bytes) and CONTEXT_CODE.encode() in text


def describe(error: BaseException) -> str:
    """`ValueError: text`, then the last frames; short enough to be stored with every failure."""
    head = "".join(traceback.format_exception_only(error)).strip()
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES))
    text = f"{head}\n{frames}".strip()
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 2]} …"
