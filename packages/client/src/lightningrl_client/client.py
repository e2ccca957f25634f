"""Reports of a hand-written agent: rewards, and the outcomes of its tools.

    report_reward("format", 1.0)                          of the rollout
    report_reward("concise", 0.5, call=reply.id)          of one model call
    with tool("search", {"q": "x"}, id=call.id) as seen:  of one tool
        seen.result = search("x")

In a worker, reports are kept with the rollout and handed in before its result. In a process that the agent has started
(forked, or its `OPENAI_BASE_URL` is the attempt's), each is posted at once. Elsewhere they are only a line in the log,
so that the same agent serves in production. Other languages: `POST $OPENAI_BASE_URL/rewards` and `…/tool_calls`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import numbers
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from lightningrl.types import ToolStatus
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_client.attribution.role import current_role, role
from lightningrl_client.attribution.scope import Report

__all__ = ["ToolOutcome", "report_reward", "role", "tool"]

ATTEMPT_URL: Final = re.compile(r"/rollouts/[^/]+/attempts/\d+/v1$")
TIMEOUT_S: Final = 30.0

logger = logging.getLogger(__name__)


def report_reward(name: str, value: float | None, *, call: str | None = None) -> None:
    """Report a reward under `name`: of the rollout, or of the model call whose answer has the id `call` (`reply.id`).

    The last value of a name stands; None = nobody scored it. A recipe takes the rollout's with `use = "reported"`;
    those of calls with an intermediate reward of that `use`. Raises ValueError for a value that is no finite number.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"reward name {name!r} is no name; give a text such as 'format'")
    if value is not None and (not isinstance(value, numbers.Real) or not math.isfinite(value)):
        raise ValueError(f"reward {name!r} is {value!r}, no finite number; report a number or None")
    body: dict[str, Any] = {"rewards": {name: None if value is None else float(value)}}
    _report(Report("rewards", body if call is None else {**body, "call": call}))


class ToolOutcome:
    """Outcome that `tool` reports when its block ends: set the fields that are known."""

    def __init__(self) -> None:
        self.result: Any = None
        """Text, or anything that JSON can say."""
        self.status: ToolStatus | str | None = None
        """None = `ok`, or what the exception says that leaves the block."""
        self.error_type: str | None = None


@contextmanager
def tool(
    name: str,
    arguments: Any = None,
    *,
    id: str | None = None,  # noqa: A002
    call: str | None = None,
) -> Iterator[ToolOutcome]:
    """Report one invocation of a tool: its arguments, result, status, time, and the role around it.

    `id` is the model's tool-call id, which says what call asked for it; where the model's answer is no tool call (a
    query in its text), `call` is that answer's id. An exception makes it `error` (TimeoutError: `timeout`, where it was
    cancelled: `unknown`) and leaves.
    """
    outcome = ToolOutcome()
    started = time.perf_counter()
    try:
        yield outcome
    except BaseException as error:
        was_ended = isinstance(error, asyncio.CancelledError | GeneratorExit)  # as where the rollout's time is over
        failure = ToolStatus.TIMEOUT if isinstance(error, TimeoutError) else ToolStatus.ERROR
        outcome.status = outcome.status or (ToolStatus.UNKNOWN if was_ended else failure)
        outcome.error_type = outcome.error_type or type(error).__name__
        raise
    finally:
        record = {
            "name": name,
            "arguments": arguments,
            "result": outcome.result,
            "status": ToolStatus(outcome.status or ToolStatus.OK).value,
            "duration_s": time.perf_counter() - started,
            "tool_call_id": id or f"tool-{uuid.uuid4().hex}",
            "call": call,
            "agent": current_role(),
            "error_type": outcome.error_type,
        }
        _report(Report("tool_calls", {"tool_calls": [json.loads(json.dumps(record, default=str))]}))


def _report(report: Report) -> None:
    redirection = installed_redirection()
    if redirection is not None:
        rollout = redirection.scope.current()
        if rollout is None:
            sentence = "%s: no rollout runs here, so nobody gets %s; report from the agent's own context"
            logger.warning(sentence, report.path, report.body)
        elif os.getpid() != redirection.pid:  # forked by the agent: nobody hands in what is kept here
            _post(redirection.server_url + rollout.base_path, rollout.key, report)
        else:
            rollout.reports.append(report)
        return
    base_url = os.environ.get("OPENAI_BASE_URL", "")
    if ATTEMPT_URL.search(base_url):
        _post(base_url, os.environ.get("OPENAI_API_KEY", ""), report)
    else:
        logger.info("%s: not in a rollout, so nobody gets %s", report.path, report.body)


def _post(base_url: str, key: str, report: Report) -> None:
    """Raises ServerError with the server's sentence."""
    from lightningrl_client.control.blocking import ControlClient

    client = ControlClient(base_url, "", patience_s=0.0, timeout_s=TIMEOUT_S)
    try:
        client.post(f"/{report.path}", report, key=key)
    finally:
        client.close()
