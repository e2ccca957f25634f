"""Tasks of all runs, those with nearly equal inputs as one, and the side of the split that each is on.

task "7 + 8?"  of run a ─┐
task "7 + 8 ?" of run b ─┴► one family ─► training or validation, whatever its rollouts earned
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Final

from lightningrl.errors import ConfigError
from lightningrl.sanitize import as_text
from lightningrl.types import Task
from lightningrl_traces.curation.near_equality import NearTexts

__all__ = ["TaskFamilies"]

_MOST_INPUT: Final = 200_000
"""Characters of an input that are compared."""


class TaskFamilies:
    """Tasks by number; near ones and those of one id have the same family."""

    def __init__(self, near: float) -> None:
        self._near = near
        self._texts = NearTexts(near)
        self._above: list[int] = []
        """Number of a task of the same family, its own for the first of it."""
        self._digests: list[str] = []
        self._by_id: dict[str, int] = {}

    def add(self, task: Task) -> int:
        """Return the number of a task; the same for the same id and input."""
        text = as_text(task.input)[:_MOST_INPUT]
        named = f"{task.id}\0{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=12).hexdigest()}"
        if named in self._by_id:
            return self._by_id[named]
        fingerprint = self._texts.read(text)
        near = self._texts.find(fingerprint)
        number = self._texts.add(fingerprint)
        self._above.append(number)
        self._digests.append(fingerprint.digest.hex())
        for other in near:
            self._join(number, other)
        self._by_id[named] = number
        return number

    def family(self, number: int) -> int:
        """Return the first task of a task's family."""
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    def validation(self, share: float) -> frozenset[int]:
        """Return the families of the validation side: at least `share` of the tasks, at most all families but one.

        The choice depends on the inputs alone. Raises ConfigError where there is one family only.
        """
        if not share:
            return frozenset()
        families: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self._above)):
            families[self.family(number)].append(number)
        if len(families) < 2:
            raise ConfigError(
                f"the {len(self._above)} tasks are one family of inputs that are nearly equal at {self._near:g}, which "
                "cannot be split without a leak; raise --near, or leave --validation out"
            )
        order = sorted(families, key=lambda family: self._mark(families[family]))
        chosen: set[int] = set()
        taken = 0
        for family in order[:-1]:
            if taken >= share * len(self._above):
                break
            chosen.add(family)
            taken += len(families[family])
        return frozenset(chosen)

    def _mark(self, members: list[int]) -> bytes:
        least = min(self._digests[member] for member in members)
        return hashlib.blake2b(f"lightningrl curate {least}".encode(), digest_size=8).digest()

    def _join(self, number: int, other: int) -> None:
        first, second = sorted((self.family(number), self.family(other)))
        self._above[second] = first
