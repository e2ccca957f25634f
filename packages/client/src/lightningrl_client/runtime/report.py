"""Result of an attempt, from what the agent returned or raised. That may be anything; a result has text without lone
surrogates, and JSON of a bounded size and depth.

    raised                                                          outcome
    the context is too long                                         context_overflow
    our gateway did not answer; the network failed; a host limits   infrastructure_error: run again, never trained
      rates or is busy; a class that the recipe names
    anything else                                                   agent_error: the lowest reward
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Collection
from typing import Any, Final

from lightningrl import sanitize
from lightningrl.control_api import Result
from lightningrl.errors import is_of_world, iterate_causes, status_of
from lightningrl.keys import Mask
from lightningrl.sanitize import NotPlain, to_plain
from lightningrl.types import Outcome
from lightningrl_client.attribution.scope import ActiveRollout

__all__ = ["clean_text", "report_exception", "report_output"]

CONTEXT_CODE: Final = "context_length_exceeded"
LONGEST_ERROR: Final = 4_000
LONGEST_OUTPUT: Final = 8 * 2**20
"""Characters of an output as JSON."""
DEEPEST_OUTPUT: Final = sanitize.DEEPEST - 1  # the body that carries it to the server is a level, too
"""Lists and dicts within each other."""
FRAMES: Final = 6
IN_THREAD: Final = (
    "the agent ran in a thread of its worker: set runtime.concurrency = 1, and more runtime.workers, "
    "and it runs in the main thread of each (an agent that is defined in a notebook has to go into a file for that)"
)
_OF_THREAD: Final = re.compile(
    r"main thread|(same|different|another|other|wrong|that|current) (OS )?thread|in (a )?thread\b"
    r"|different (event )?loop"
    r"|_thread\._local|LookupError: <ContextVar|thread[- ]local|no[tn][- ]thread-?safe",
    re.IGNORECASE,
)
"""Words of signals, SQLite, event loops, GUIs, greenlets (Playwright), and values set in the main thread alone."""


def report_output(output: Any, *, agent: str, duration_s: float) -> Result:
    """A success, unless the agent returned nothing, something that is not JSON, or more than is kept."""
    try:
        return Result(outcome=Outcome.SUCCEEDED, output=as_json(output), duration_s=duration_s)
    except ValueError as problem:
        return Result(outcome=Outcome.AGENT_ERROR, error=f"the agent {agent!r} {problem}", duration_s=duration_s)


def as_json(output: Any) -> Any:
    """The output as it will be read again. Raises ValueError, which completes "the agent …"."""
    if output is None:
        raise ValueError("returned nothing; return its answer, which the reward looks at")
    try:
        plain = to_plain(output, "output", levels=DEEPEST_OUTPUT)
    except NotPlain as problem:
        raise ValueError(f"returned a {type(output).__name__} that cannot be kept: {problem}") from problem
    length = len(json.dumps(plain, ensure_ascii=False))
    if length > LONGEST_OUTPUT:
        most = f"at most {LONGEST_OUTPUT} are kept"
        raise ValueError(f"returned {length} characters; {most}, return what the reward looks at")
    return plain


def report_exception(
    error: BaseException,
    rollout: ActiveRollout,
    *,
    duration_s: float,
    infrastructure: Collection[str] = (),
    is_in_thread: bool = False,
) -> Result:
    """Say what ended the attempt: the world, the context's length, or the agent. `infrastructure`: exceptions that the
    recipe counts to the world. `is_in_thread`: a sync agent ran in another thread than the main one, which may be why
    it raised."""
    try:
        outcome = outcome_of(error, rollout, infrastructure)
    except BaseException:  # noqa: BLE001  an exception is the agent's code as well, whatever its attributes raise
        outcome = Outcome.AGENT_ERROR
    sentence = Mask.of_variables(os.environ, rollout.key).text(describe(error, is_in_thread=is_in_thread))
    return Result(outcome=outcome, error=sentence, duration_s=duration_s)


def outcome_of(error: BaseException, rollout: ActiveRollout, infrastructure: Collection[str] = ()) -> Outcome:
    causes = list(iterate_causes(error))
    if any(is_context_overflow(cause) for cause in causes):
        return Outcome.CONTEXT_OVERFLOW
    unanswered = {id(lost) for lost in rollout.connection_errors}
    if any(id(cause) in unanswered or is_of_server(cause, rollout) for cause in causes):
        return Outcome.INFRASTRUCTURE_ERROR
    if is_of_world(error, infrastructure):
        return Outcome.INFRASTRUCTURE_ERROR
    return Outcome.AGENT_ERROR


def is_context_overflow(error: BaseException) -> bool:
    if getattr(error, "code", None) == CONTEXT_CODE or CONTEXT_CODE in str(error):
        return True
    # httpx and requests: the answer's body, if it was read
    text = getattr(getattr(error, "response", None), "_content", b"")
    return isinstance(text, bytes) and CONTEXT_CODE.encode() in text


def is_of_server(error: BaseException, rollout: ActiveRollout) -> bool:
    """True if an HTTP error is our server's own failure: any of its 5xx."""
    status = status_of(error)
    url = getattr(getattr(error, "response", None), "url", "")
    url = url or getattr(getattr(error, "request_info", None), "real_url", "")
    return status is not None and status >= 500 and rollout.base_path in str(url)


def describe(error: BaseException, *, is_in_thread: bool = False) -> str:
    """`ValueError: text`, then the last frames; short enough to be stored with every failure."""
    try:
        head = "".join(traceback.format_exception_only(error)).strip()
        causes = (f"{type(cause).__name__}: {cause}" for cause in iterate_causes(error))
        if is_in_thread and any(map(_OF_THREAD.search, causes)):
            head = f"{head[: LONGEST_ERROR // 2]}; {IN_THREAD}"
        frames = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES))
    except BaseException as problem:  # noqa: BLE001  as above
        return clean_text(f"{type(error).__name__}, which cannot be shown: {type(problem).__name__}")
    return clean_text(f"{head}\n{frames}".strip())


def clean_text(text: str, longest: int = LONGEST_ERROR) -> str:
    """Text that anybody can store and show: at most `longest` characters, no lone surrogates."""
    return sanitize.clean_text(text if len(text) <= longest else f"{text[: longest - 2]} …")
