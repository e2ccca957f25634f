"""How values become columns: token ids, logprobs, texts, JSON, span ids. All little-endian; decoding copies nothing it can view.

Texts are clean on both ways (`lightningrl.sanitize`): what agents send is kept without lone surrogates, and what older versions kept with
them can be read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import StoreError
from lightningrl.sanitize import DEEPEST, clean_json, clean_text
from lightningrl.types import Array, IntArray, SamplingSettings

__all__ = [
    "as_number",
    "column_text",
    "count_tokens",
    "decode_advantages",
    "decode_floats",
    "decode_json",
    "decode_many",
    "decode_output",
    "decode_sampling",
    "decode_span",
    "decode_text",
    "decode_tokens",
    "encode_advantages",
    "encode_floats",
    "encode_json",
    "encode_span",
    "encode_text",
    "encode_tokens",
]

_COMPRESS_FROM = 200
"""Texts shorter than this (bytes) are kept as they are."""

_json = msgspec.json.Encoder(order="deterministic")
_sampling = msgspec.json.Decoder(SamplingSettings)


def as_number(value: int) -> int:
    """For a comparison: a number beyond 64 bits, which a database cannot be asked for, becomes -1, which no attempt or step has."""
    return value if -(2**63) <= value < 2**63 else -1


def encode_tokens(ids: IntArray | Sequence[int]) -> bytes:
    """Width in bytes (2, 3 or 4) as the first byte, then that many bytes per token."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size == 0:
        return b"\x02"
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise StoreError(f"token id {low if low < 0 else high} is out of range; an engine returns ids from 0 to 2**31 - 1")
    if high < 2**16:
        return b"\x02" + array.astype("<u2").tobytes()
    wide = array.astype("<u4")
    if high < 2**24:
        return b"\x03" + wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return b"\x04" + wide.tobytes()


def decode_tokens(data: bytes) -> NDArray[Any]:
    """An integer array of whatever width; concatenate into int32."""
    width = data[0]
    if width == 2:
        return np.frombuffer(data, "<u2", offset=1)
    if width == 4:
        return np.frombuffer(data, "<i4", offset=1)
    packed = np.frombuffer(data, np.uint8, offset=1).reshape(-1, 3)
    wide = np.zeros((len(packed), 4), np.uint8)
    wide[:, :3] = packed
    return wide.view("<i4").ravel()


def count_tokens(data: bytes) -> int:
    """How many `decode_tokens` gives."""
    return (len(data) - 1) // data[0]


def decode_many(columns: Sequence[bytes]) -> list[NDArray[Any]]:
    """`decode_tokens` of each, at once where they are of one width."""
    widths = {data[0] for data in columns}
    if len(widths) != 1:
        return [decode_tokens(data) for data in columns]
    width = widths.pop()
    flat = decode_tokens(bytes((width,)) + b"".join([data[1:] for data in columns]))
    parts, start = [], 0
    for data in columns:
        end = start + count_tokens(data)
        parts.append(flat[start:end])
        start = end
    return parts


def encode_floats(values: Array) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def decode_floats(data: bytes) -> Array:
    return np.frombuffer(data, "<f4")


def encode_advantages(values: Array) -> bytes:
    """Constant over the call's tokens, as credit per call is: one number. Else one per token. The first byte tells."""
    array = np.asarray(values, dtype="<f4")
    if array.size and bool((array == array[0]).all()):
        return b"c" + array[:1].tobytes()
    return b"t" + array.tobytes()


def decode_advantages(data: bytes, length: int) -> Array:
    values = np.frombuffer(data, "<f4", offset=1)
    return np.full(length, values[0], np.float32) if data[:1] == b"c" else values


def column_text(text: str) -> str:
    """A short text as it stands in a column: PostgreSQL's have no NUL."""
    return clean_text(text).replace("\0", "\ufffd")


def encode_text(text: str | None) -> bytes | None:
    if not text:
        return None
    data = clean_text(text).encode()
    return b"z" + zlib.compress(data, 1) if len(data) >= _COMPRESS_FROM else b"p" + data


def decode_text(data: bytes | None) -> str:
    if data is None:
        return ""
    plain = zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:]
    return clean_text(plain.decode("utf-8", "surrogatepass"))


def encode_json(value: Any, what: str) -> str:
    """Deterministic JSON; `what` names the value in the error."""
    try:
        try:
            return _json.encode(value).decode()
        except UnicodeEncodeError:
            return _json.encode(clean_json(value, cut=True)).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise StoreError(f"{what} is not JSON ({error}); use dicts with string keys, lists, strings, numbers, booleans and None") from None


def decode_json(text: str | bytes) -> Any:
    return msgspec.json.decode(text)


def decode_output(text: str) -> Any:
    """The output of an agent; None in place of what lies too deep to be sent on."""
    if not text:
        return None
    try:
        value = decode_json(text)
    except RecursionError:
        return None
    return clean_json(value, cut=True) if text.count("[") + text.count("{") > DEEPEST else value


def decode_sampling(text: str) -> SamplingSettings:
    return _sampling.decode(text)


def encode_span(span_id: str | None) -> bytes | None:
    """Eight bytes for the 16 hexadecimal digits of a span id; anything else as text."""
    if not span_id:
        return None
    span_id = clean_text(span_id)
    if len(span_id) == 16:
        try:
            return bytes.fromhex(span_id)
        except ValueError:
            pass
    return b"s" + span_id.encode()


def decode_span(data: bytes | None) -> str | None:
    if data is None:
        return None
    return data.hex() if len(data) == 8 else data[1:].decode()
