"""Seeds of the requests that bring none: one seed of a run gives one seed to each call of a rollout, whichever call
comes first."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from lightningrl.backends import GenerateRequest

__all__ = ["RequestSeeds"]

_REMEMBERED = 50_000
"""Prompts whose number of requests is remembered. Beyond it, a prompt that an attempt sends again may get its first
seed again."""


class RequestSeeds:
    """Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self._key = blake2b(str(seed).encode(), digest_size=32).digest()
        self._random = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._asked: OrderedDict[bytes, int] = OrderedDict()

    def draw(self, request: GenerateRequest) -> int:
        """64 bits: of the run's seed, the session, the prompt, and how often the session has sent that prompt. Without
        a session, the generator's next."""
        if not request.session:
            return self._random.getrandbits(64)
        place = blake2b(request.session.encode(), digest_size=16, key=self._key)
        place.update(np.asarray(request.prompt_ids, np.int64).tobytes())
        asked = self._asked.pop(place.digest(), 0)
        self._asked[place.digest()] = asked + 1
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        place.update(asked.to_bytes(8, "little"))
        return int.from_bytes(place.digest()[:8], "little")

    def random_state(self) -> list[object]:
        version, internal, gauss = self._random.getstate()
        return [version, list(internal), gauss]

    def set_random_state(self, state: list[object]) -> None:
        version, internal, gauss = state
        self._random.setstate((version, tuple(internal), gauss))  # type: ignore[arg-type]
