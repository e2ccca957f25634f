"""Services of a credit assigner's `score`, answered by functions: `ScriptedServices(values=len)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lightningrl.types import Array, IntArray, Trajectory
from lightningrl_runs.segments import SegmentReader
from lightningrl_runs.trace import read_messages

__all__ = ["ScriptedServices"]


class ScriptedServices:
    """Implements `lightningrl.protocols.Services`; what has no function raises NotImplementedError. Texts are tokens'
    numbers."""

    def __init__(
        self,
        *,
        judge: Callable[..., Awaitable[str]] | None = None,
        logprobs: Callable[[list[int], list[int]], Sequence[float]] | None = None,
        values: Callable[[list[int]], float] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Answer with `judge(messages, **settings)`, `logprobs(tokens, context)`, `values(context)` of one context,
        `encode(text)`."""
        self._judge = judge
        self._logprobs = logprobs
        self._values = values
        self._encode = encode

    async def __call__(self, messages: str | Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
        if self._judge is None:
            raise NotImplementedError
        return await self._judge(messages, **settings)

    async def logprobs(
        self,
        tokens: Sequence[int] | IntArray,
        context: Sequence[int] | IntArray,
        *,
        policy: str | None = None,
        reference: bool = False,
    ) -> Array:
        if self._logprobs is None:
            raise NotImplementedError
        return np.array(self._logprobs(list(map(int, tokens)), list(map(int, context))), np.float32)

    async def values(self, contexts: Sequence[Sequence[int] | IntArray], *, policy: str | None = None) -> Array:
        if self._values is None:
            raise NotImplementedError
        return np.array([self._values(list(map(int, context))) for context in contexts], np.float32)

    async def token_values(
        self, tokens: Sequence[int] | IntArray, context: Sequence[int] | IntArray, *, policy: str | None = None
    ) -> Array:
        read = [*map(int, context), *map(int, tokens)]
        return await self.values([read[:end] for end in range(len(context), len(read) + 1)])

    async def encode(self, text: str, *, policy: str | None = None) -> list[int]:
        if self._encode is None:
            raise NotImplementedError
        return self._encode(text)

    async def read(self, trajectory: Trajectory, /) -> list[list[tuple[str, str]]]:
        return read_messages(trajectory, lambda _: SegmentReader(None))
