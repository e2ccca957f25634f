"""Asks an OpenAI-compatible endpoint about finished rollouts: patient, within bounds and a budget; records every call.

score(trajectory, ask) ─► ask(messages) ─► POST {base_url}/chat/completions ─► text
                              └─ no answer, 408, 409, 429, 5xx ─► again, after a pause ─► … ─► JudgeError
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from lightningrl.credentials import check_key
from lightningrl.errors import JudgeError
from lightningrl.keys import Mask
from lightningrl.recipe_tables import JudgeConfig
from lightningrl.sanitize import clean_text, parse_json
from lightningrl.types import OtherCall, OtherCallKind
from lightningrl_server.inflate import UNCOMPRESSED, read_at_most

__all__ = ["Judge", "Questions"]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Most seconds between two tries, which double; also where the endpoint asks for more by `retry-after`."""
PATH: Final = "chat/completions"
_AGAIN: Final = frozenset({408, 409, 429})
LONGEST_ANSWER: Final = 1_000_000
"""Bytes; the rest is left unread."""
_KEPT_CHARACTERS: Final = 100_000
"""Most characters of a request or an answer that is recorded whole."""


class Judge:
    """One endpoint and model. Used on one event loop."""

    def __init__(self, config: JudgeConfig, api_key: str | None = None) -> None:
        """Raises ConfigError for a key that no header can carry."""
        api_key = None if api_key is None else check_key(api_key, "the judge's api_key")
        self.config = config
        self.base_url = config.base_url.rstrip("/")
        self.headers = UNCOMPRESSED | ({} if api_key is None else {"authorization": f"Bearer {api_key}"})
        self.mask = Mask([api_key])
        """For whatever leaves: an endpoint may say the key again."""
        self.places = asyncio.Semaphore(config.concurrency)
        self._certificates = httpx.create_ssl_context()  # takes tens of milliseconds, so once

    def client(self) -> httpx.AsyncClient:
        """For one call."""
        return httpx.AsyncClient(headers=self.headers, timeout=self.config.timeout_s, verify=self._certificates)


class Questions:
    """`ask` for one rollout, or for those of a group, which have their budgets together. Its calls are `asked`."""

    def __init__(self, judge: Judge | None, *, rollouts: int = 1) -> None:
        self._judge = judge
        self._rollouts = rollouts
        self._calls = 0
        self._tokens = 0
        self.asked: list[OtherCall] = []

    async def __call__(self, messages: str | Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
        """Ask the judge a question, or messages. `settings` go into the request (`temperature`, `max_tokens`, …).
        Raises JudgeError: no [judge], the budget is used up, no answer after all tries, or one without text."""
        judge = self._judge
        if judge is None:
            raise JudgeError("there is no judge to ask; add a [judge] table with base_url and model")
        if self._calls >= judge.config.max_calls * self._rollouts:
            raise JudgeError(f"a rollout may ask its judge {judge.config.max_calls} times; raise judge.max_calls")
        if self._tokens >= judge.config.max_tokens * self._rollouts:
            raise _too_many(judge)
        self._calls += 1
        dialogue = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"model": judge.config.model, "messages": dialogue, **settings}
        pause = FIRST_PAUSE_S
        for left in reversed(range(judge.config.retries + 1)):
            status, answer, problem, wanted = await self._try(judge, body)
            if problem is None:
                break
            if not left or not (status is None or status in _AGAIN or status >= 500):
                raise JudgeError(f"the judge at {judge.base_url!r}: {problem}")
            await asyncio.sleep(min(max(pause, wanted), LONGEST_PAUSE_S))
            pause *= 2
        try:
            self._tokens += max(0, int((answer.get("usage") or {}).get("total_tokens") or 0))
            text = str(answer["choices"][0]["message"]["content"] or "")
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
            raise JudgeError(
                f"the judge at {judge.base_url!r} answered without a text: {str(answer)[:200]!r}"
            ) from None
        if self._tokens > judge.config.max_tokens * self._rollouts:
            raise _too_many(judge)
        return text

    async def _try(self, judge: Judge, body: Mapping[str, Any]) -> tuple[int | None, Any, str | None, float]:
        """Make a call and record it, whatever came of it: status, answer, problem, the endpoint's wait in s."""
        status: int | None = None
        answer: Any = None
        problem: str | None = None
        wanted = 0.0
        async with judge.places:
            started_at, clock = time.time(), time.perf_counter()
            try:
                async with (
                    asyncio.timeout(judge.config.timeout_s),
                    judge.client() as client,
                    client.stream("POST", f"{judge.base_url}/{PATH}", json=body) as response,
                ):
                    read, is_cut = await read_at_most(response, LONGEST_ANSWER)
                status = response.status_code
                text = clean_text(judge.mask.text(read.decode(errors="replace")))
                answer = {"bytes": f"more than {LONGEST_ANSWER}"} if is_cut else judge.mask.json(_parse(text))
                if status >= 400:
                    problem = f"HTTP {status}: {' '.join(text.split())[:200]}"
                    wanted = _seconds(response.headers.get("retry-after"))
                elif is_cut:
                    problem = (
                        f"its answer has more than {LONGEST_ANSWER} bytes, and the rest is unread; check what is at "
                        "that address"
                    )
            except (httpx.HTTPError, TimeoutError) as error:
                problem = judge.mask.text(f"{type(error).__name__}: {error}").rstrip(": ")
        code = None if problem is None else problem.split(":")[0] if status is None else f"http_{status}"
        self.asked.append(
            OtherCall(
                kind=OtherCallKind.JUDGE,
                path=PATH,
                model=judge.config.model,
                status=status,
                code=code,
                request=_bounded(body),
                answer=_bounded(answer),
                started_at=started_at,
                duration_s=time.perf_counter() - clock,
            )
        )
        return status, answer, problem, wanted


def _too_many(judge: Judge) -> JudgeError:
    return JudgeError(f"a rollout may use {judge.config.max_tokens} tokens of its judge; raise judge.max_tokens")


def _parse(text: str) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError:
        return text


def _bounded(value: Any) -> Any:
    size = len(json.dumps(value, default=str))
    return value if size <= _KEPT_CHARACTERS else {"characters": size}


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:  # a date
        return 0.0
