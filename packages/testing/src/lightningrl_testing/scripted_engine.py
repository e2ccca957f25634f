"""An engine that says what a test wrote, in real token ids with logprobs that can be computed again."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import ContextOverflow
from lightningrl.types import FinishReason

__all__ = ["Emission", "ScriptedEngine", "pseudo_logprobs"]


def pseudo_logprobs(token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return logprobs as exact float32, told by token and position: what a test expects to find in the store."""
    values = [-0.001 - (zlib.crc32(b"%d:%d" % (i, token)) % 5000) / 1000 for i, token in enumerate(token_ids)]
    return tuple(np.asarray(values, dtype=np.float32).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """The tokens that the engine sampled for one request."""

    request: GenerateRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason


@dataclass(eq=False)
class ScriptedEngine:
    """Answers with `enqueue`d texts in order, else with `reply(prompt text)`, else with "ok".

    A text ends with the tokenizer's eos token, as a model would sample it; `enqueue(text, ends=False)` leaves it out.
    `grammars`: say that answers keep to grammars; they are as scripted all the same.
    """

    tokenizer: Any
    _: KW_ONLY
    policy: str = "policy"
    version: int = 0
    context_length: int = 32_768
    reply: Callable[[str], str] | None = None
    token_delay_s: float = 0.0
    chunk_tokens: int = 1
    grammars: bool = False

    def __post_init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        """All requests, in order."""
        self.emissions: dict[str, Emission] = {}
        """Completions that were sampled to the end, by request id (the transition's id)."""
        self.cancelled: list[str] = []
        """Requests that were given up."""
        self._script: deque[tuple[int, ...]] = deque()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def info(self) -> EngineInfo:
        length = self.context_length
        return EngineInfo(policy=self.policy, version=self.version, context_length=length, grammars=self.grammars)

    def enqueue(self, *texts: str, ends: bool = True) -> None:
        """Say these next, one per request."""
        for text in texts:
            self.enqueue_ids(self.tokenizer.encode(text, add_special_tokens=False), ends=ends)

    def enqueue_ids(self, token_ids: Sequence[int], *, ends: bool = True) -> None:
        """Say exactly these tokens next."""
        self._script.append((*token_ids, self.tokenizer.eos_token_id) if ends else tuple(token_ids))

    def pause(self) -> None:
        """Keep every request waiting before its first token."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        if len(request.prompt_ids) >= self.context_length:
            raise ContextOverflow(f"the prompt has {len(request.prompt_ids)} tokens, the context {self.context_length}")
        script = self._next(request)
        is_done = False
        try:
            await self._open.wait()
            version = self.version
            token_ids, finish = self._cut(script, request)
            logprobs = pseudo_logprobs(token_ids)
            for start in range(0, len(token_ids), self.chunk_tokens):
                if self.token_delay_s:
                    await asyncio.sleep(self.token_delay_s)
                end = min(start + self.chunk_tokens, len(token_ids))
                is_done = end == len(token_ids)
                if is_done:
                    self.emissions[request.id] = Emission(
                        request=request,
                        token_ids=token_ids,
                        logprobs=logprobs,
                        policy_version=version,
                        finish_reason=finish,
                    )
                yield TokenChunk(
                    token_ids=token_ids[start:end],
                    logprobs=logprobs[start:end],
                    policy_version=version,
                    finish_reason=finish if is_done else None,
                )
        finally:
            if not is_done:
                self.cancelled.append(request.id)

    def _next(self, request: GenerateRequest) -> tuple[int, ...]:
        if self._script:
            return self._script.popleft()
        text = self.reply(self.tokenizer.decode(list(request.prompt_ids))) if self.reply is not None else "ok"
        return (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)

    def _cut(self, script: tuple[int, ...], request: GenerateRequest) -> tuple[tuple[int, ...], FinishReason]:
        """Apply the bounds that an engine applies: stop tokens, stop strings, most tokens."""
        sampling = request.sampling
        for i, token in enumerate(script):
            if i + 1 > sampling.max_tokens:
                return script[:i], FinishReason.LENGTH
            is_stopped = token in sampling.stop_token_ids or (
                sampling.stop and any(stop in self.tokenizer.decode(list(script[: i + 1])) for stop in sampling.stop)
            )
            if is_stopped:
                return script[: i + 1], FinishReason.STOP
        return script, FinishReason.LENGTH
