"""Texts that are nearly equal, found without comparing each with each: MinHash signatures in bands.

text ─► its 5-byte pieces, lower case and single spaces ─► 128 least hashes ─► bands: texts that share one are compared

The share of equal hashes estimates the Jaccard similarity of the pieces, with a standard error of at most 0.045
(Broder, "On the resemblance and containment of documents", 1997). Texts whose numbers differ are never nearly equal:
"12 + 30" and "12 + 31" are two tasks.
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

__all__ = ["Fingerprint", "NearTexts"]

_HASHES: Final = 128
_PIECE: Final = 5
_AT_ONCE: Final = 4096
"""Pieces that are hashed together, so that a long text takes no more memory than a short one."""
_MISSED: Final = 1e-3
"""Largest probability that a text exactly as near as the threshold shares no band."""
_NUMBER: Final = re.compile(r"\d+")
_random = np.random.default_rng(20261126)
_FACTORS: Final = _random.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS: Final = _random.integers(0, 2**63, _HASHES, dtype=np.uint64)
Signature = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A text, or several that belong together, as they are compared."""

    digest: bytes
    """Digest of the texts in lower case, with single spaces."""
    equal: bytes
    """Digest of what has to be equal: the numbers in them, in their order, and where they stand."""
    signatures: tuple[Signature, ...]
    """Signatures of each text; empty where only equal texts count."""


class NearTexts:
    """Texts by number, from 0; about 3 kB for each. Two are near where each of their parts is."""

    def __init__(self, threshold: float, *, parts: int = 1) -> None:
        """`threshold`: least similarity of nearly equal texts, 0 to 1; 1.0 = only equal ones, up to case and spaces.
        `parts`: number of texts that are compared as one."""
        self._threshold = threshold
        self._rows = _rows_of_band(threshold, parts)
        self._equal: dict[bytes, int] = {}
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._kept: list[Fingerprint] = []

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, *texts: str, within: str = "") -> Fingerprint:
        """Return the fingerprint of texts that are compared one by one: a question and its answer. Texts `within`
        different ones, as instructions, are never near."""
        plain = [" ".join(text.lower().split()) for text in texts]
        return Fingerprint(
            _digest("\0".join((*plain, within))),
            _digest("\0".join((*(" ".join(_NUMBER.findall(text)) for text in plain), within))),
            () if self._threshold >= 1.0 else tuple(map(_signature, plain)),
        )

    def find(self, text: Fingerprint) -> list[int]:
        """Return the numbers of the texts that are near, in order."""
        equal = self._equal.get(text.digest)
        near = {equal} if equal is not None else set[int]()
        candidates = {number for band in self._bands_of(text) for number in self._bands.get(band, ())}
        near |= {number for number in candidates - near if self._is_near(text, self._kept[number])}
        return sorted(near)

    def add(self, text: Fingerprint) -> int:
        """Keep a text; returns its number."""
        number = len(self._kept)
        self._kept.append(text)
        self._equal.setdefault(text.digest, number)
        for band in self._bands_of(text):
            self._bands[band].append(number)
        return number

    def _bands_of(self, text: Fingerprint) -> Iterator[tuple[int, bytes]]:
        if not text.signatures:
            return
        for place in range(0, _HASHES, self._rows):
            parts = b"".join(signature[place : place + self._rows].tobytes() for signature in text.signatures)
            yield place, hashlib.blake2b(parts, digest_size=8).digest()

    def _is_near(self, text: Fingerprint, other: Fingerprint) -> bool:
        return text.equal == other.equal and all(
            float(np.mean(left == right)) >= self._threshold
            for left, right in zip(text.signatures, other.signatures, strict=True)
        )


def _rows_of_band(threshold: float, parts: int) -> int:
    """Return the most hashes of a band, so that hardly a near text is missed: 1 - (1 - t^(rows · parts))^bands are
    found."""
    return next(
        (rows for rows in (32, 16, 8, 4, 2) if (1.0 - threshold ** (rows * parts)) ** (_HASHES // rows) <= _MISSED),
        1,
    )


def _signature(text: str) -> Signature:
    data = np.frombuffer(text.encode(errors="replace").ljust(_PIECE, b"\0"), np.uint8).astype(np.uint64)
    pieces = np.zeros(len(data) - _PIECE + 1, np.uint64)
    for place in range(_PIECE):
        pieces |= data[place : place + len(pieces)] << np.uint64(8 * place)
    pieces = np.unique(pieces)
    least = np.full(_HASHES, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(pieces), _AT_ONCE):
        some = pieces[start : start + _AT_ONCE, None]
        # multiply-shift hashing (Dietzfelbinger et al. 1997): the high half of a · x + b, modulo 2^64
        hashes = ((some * _FACTORS + _OFFSETS) >> np.uint64(32)).astype(np.uint32)
        least = np.minimum(least, hashes.min(axis=0))
    return least


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()
