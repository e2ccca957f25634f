"""Texts that are nearly equal, found without comparing each with each, and tasks that are one family by them.

text ─► its 5-byte pieces, lower case and single spaces ─► 128 least hashes ─► bands: texts that share one are compared

The share of equal hashes estimates the Jaccard similarity of the pieces, with a standard error of at most 0.045
(Broder, "On the resemblance and containment of documents", 1997). Texts whose numbers differ are never nearly equal:
"12 + 30" and "12 + 31" are two tasks.

task "7 + 8?"  of run a ─┐
task "7 + 8 ?" of run b ─┴► one family ─► training or validation, whatever its rollouts earned
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import ConfigError
from lightningrl.sanitize import as_text
from lightningrl.types import Task

__all__ = ["Fingerprint", "NearTexts", "TaskFamilies"]

_HASHES: Final = 128
_PIECE: Final = 5
_AT_ONCE: Final = 4096
"""Pieces that are hashed together, so that a long text takes no more memory than a short one."""
_MISSED: Final = 1e-3
"""Largest probability that a text exactly as near as the threshold shares no band."""
_MOST_INPUT: Final = 200_000
"""Characters of a task's input that are compared."""
_NUMBER: Final = re.compile(r"\d+")
_PLACES: Final = np.uint64(256) ** np.arange(_PIECE, dtype=np.uint64)
_random = np.random.default_rng(20261126)
_FACTORS: Final = _random.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS: Final = _random.integers(0, 2**63, _HASHES, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A text, or several that belong together, as they are compared."""

    digest: bytes
    """Digest of the texts in lower case, with single spaces."""
    equal: bytes
    """Digest of what has to be equal: the numbers in them, in their order, and where they stand."""
    signatures: NDArray[np.uint32]
    """Least hashes of each text, [text][hash]; no text where only equal ones count."""


class NearTexts:
    """Texts by number, from 0; about 3 kB for each. Two are near where each of their parts is."""

    def __init__(self, threshold: float, *, parts: int = 1) -> None:
        """`threshold`: least similarity of nearly equal texts, 0 to 1; 1.0 = only equal ones, up to case and spaces.
        `parts`: number of texts that are compared as one."""
        self._threshold = threshold
        self._rows = _rows_of_band(threshold, parts)
        self._equal: dict[bytes, int] = {}
        self._bands: dict[bytes, list[int]] = defaultdict(list)
        self._kept: list[Fingerprint] = []

    def read(self, *texts: str, within: str = "") -> Fingerprint:
        """Return the fingerprint of texts that are compared one by one: a question and its answer. Texts `within`
        different ones, as instructions, are never near."""
        plain = [" ".join(text.lower().split()) for text in texts]
        signatures = [] if self._threshold >= 1.0 else list(map(_signature, plain))
        return Fingerprint(
            _digest("\0".join((*plain, within))),
            _digest("\0".join((*(" ".join(_NUMBER.findall(text)) for text in plain), within))),
            np.array(signatures, np.uint32).reshape(-1, _HASHES),
        )

    def find(self, text: Fingerprint) -> list[int]:
        """Return the numbers of the texts that are near, in order."""
        equal = self._equal.get(text.digest)
        candidates = {number for band in self._bands_of(text) for number in self._bands.get(band, ())} - {equal}
        near = [number for number in candidates if self._is_near(text, self._kept[number])]
        return sorted(near if equal is None else [equal, *near])

    def add(self, text: Fingerprint) -> int:
        """Keep a text; returns its number."""
        number = len(self._kept)
        self._kept.append(text)
        self._equal.setdefault(text.digest, number)
        for band in self._bands_of(text):
            self._bands[band].append(number)
        return number

    def _bands_of(self, text: Fingerprint) -> Iterator[bytes]:
        for place in range(0, _HASHES if len(text.signatures) else 0, self._rows):
            band = text.signatures[:, place : place + self._rows].tobytes()
            yield hashlib.blake2b(band, digest_size=8, key=bytes([place])).digest()

    def _is_near(self, text: Fingerprint, other: Fingerprint) -> bool:
        shares = (text.signatures == other.signatures).mean(axis=1)
        return text.equal == other.equal and bool(np.all(shares >= self._threshold))


class TaskFamilies:
    """Tasks of all runs by number; near ones and those of one id have the same family."""

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


def _rows_of_band(threshold: float, parts: int) -> int:
    """Return the most hashes of a band, so that hardly a near text is missed: 1 - (1 - t^(rows · parts))^bands are
    found."""
    return next(
        (rows for rows in (32, 16, 8, 4, 2) if (1.0 - threshold ** (rows * parts)) ** (_HASHES // rows) <= _MISSED),
        1,
    )


def _signature(text: str) -> NDArray[np.uint32]:
    data = np.frombuffer(text.encode(errors="replace").ljust(_PIECE, b"\0"), np.uint8).astype(np.uint64)
    pieces = np.unique(np.lib.stride_tricks.sliding_window_view(data, _PIECE) @ _PLACES)
    least = np.full(_HASHES, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(pieces), _AT_ONCE):
        some = pieces[start : start + _AT_ONCE, None]
        # multiply-shift hashing (Dietzfelbinger et al. 1997): the high half of a · x + b, modulo 2^64
        hashes = ((some * _FACTORS + _OFFSETS) >> np.uint64(32)).astype(np.uint32)
        least = np.minimum(least, hashes.min(axis=0))
    return least


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()
