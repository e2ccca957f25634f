"""One forward pass for the rows of several policies on one frozen base: the base's weights are read once for all of
them, and each row gets its own policy's adapters.

engine of a ─decode─► JointPasses ─the first computes─► logits of a's rows
engine of b ─decode─►    │ waits for who came last time └► logits of b's rows
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightningrl_torch._forward import Forward
from lightningrl_torch._llama import LlamaForward
from lightningrl_torch._slots import KeyValues, SlotCache

__all__ = ["JointForward", "Part", "decode_together", "with_joint_passes"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class Part:
    """Rows of one policy: the arguments of its `decode`."""

    forward: LlamaForward
    token_ids: Tensor
    positions: Tensor
    cache: SlotCache
    allowed: Tensor | None
    is_over: bool = False
    logits: Tensor | None = None
    """None after a pass that failed."""


def decode_together(parts: Sequence[Part]) -> list[Tensor]:
    """Logits (rows, vocabulary) of each part, in one pass."""
    ends = list(accumulate(len(part.token_ids) for part in parts))
    rows = [slice(end - len(part.token_ids), end) for part, end in zip(parts, ends, strict=True)]
    cosines, sines = zip(*(part.forward.rotation(part.positions) for part in parts), strict=True)
    attends = [part.forward.attention_of(part.cache, part.allowed) for part in parts]

    def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat([own(number, queries[r], keys[r], values[r]) for own, r in zip(attends, rows, strict=True)])

    joined = parts[0].forward.joined([part.forward for part in parts[1:]], rows)
    token_ids = torch.cat([part.token_ids for part in parts])
    logits = joined.step(token_ids, torch.cat(cosines), torch.cat(sines), attend)
    return [logits[each] for each in rows]


class JointPasses:
    """Brings the engines' threads of one base together. The first to come waits for those who came last time, at most
    as long as the last pass took, and computes for all who are there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Part] = []
        self._is_led = False
        self._last: set[int] = set()
        """Policies that came last time."""
        self._patience_s = 0.0

    def decode(self, part: Part) -> Tensor:
        """Logits of the part's rows. Blocking."""
        with self._changed:
            self._waiting.append(part)
            self._changed.notify_all()
            self._changed.wait_for(lambda: part.is_over or not self._is_led)
            if not part.is_over:
                self._is_led = True
                self._changed.wait_for(lambda: self._last <= self._here(), self._patience_s)
                self._last = self._here()
                parts, self._waiting = self._waiting, []
        if not part.is_over:
            self._compute(parts)
        if part.logits is None:  # what fails together is tried alone, so that it fails the policy that it is of
            return part.forward.decode(part.token_ids, part.positions, part.cache, part.allowed)
        return part.logits

    def _here(self) -> set[int]:
        return {id(part.forward) for part in self._waiting}

    def _compute(self, parts: Sequence[Part]) -> None:
        began = time.monotonic()
        try:
            if len(parts) > 1:
                for part, logits in zip(parts, decode_together(parts), strict=True):
                    part.logits = logits
            else:
                (only,) = parts
                only.logits = only.forward.decode(only.token_ids, only.positions, only.cache, only.allowed)
        except Exception:
            logger.exception("a forward pass of %d policies failed; each is computed alone", len(parts))
        with self._changed:
            self._patience_s = time.monotonic() - began
            self._is_led = False
            for part in parts:
                part.is_over = True
            self._changed.notify_all()


JOINT_PASSES: Final[WeakValueDictionary[Hashable, JointPasses]] = WeakValueDictionary()
"""Joint passes by base; one is gone with the last policy on it."""
MAKING: Final = threading.Lock()


class JointForward:
    """Implements `Forward`: decodes together with other policies, and does all else alone."""

    packs = True

    def __init__(self, forward: LlamaForward, passes: JointPasses) -> None:
        self.forward = forward
        self.layers, self.vocabulary, self.device = forward.layers, forward.vocabulary, forward.device
        self._passes = passes

    def refresh(self) -> None:
        """See `Forward`."""
        self.forward.refresh()

    def rest(self) -> None:
        """See `Forward`."""
        self.forward.rest()

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """See `Forward`."""
        return self.forward.prefill(sequences, before)

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        """See `Forward`."""
        part = Part(forward=self.forward, token_ids=token_ids, positions=positions, cache=cache, allowed=allowed)
        return self._passes.decode(part)


def with_joint_passes(forward: Forward) -> Forward:
    """The forward with decoding in joint passes, where it is one of ours on a CPU, with adapters on a frozen base. On a
    GPU a policy's own graphs are worth more."""
    base = forward.base if isinstance(forward, LlamaForward) else None
    if base is None or not isinstance(forward, LlamaForward) or forward.device.type != "cpu":
        return forward
    with MAKING:
        passes = JOINT_PASSES.get(base)
        if passes is None:
            passes = JOINT_PASSES[base] = JointPasses()
    return JointForward(forward, passes)
