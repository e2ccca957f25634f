"""Column types, and the encoding of values in them: token ids, logprobs, texts, JSON, span ids.

All numbers are little-endian; decoding copies nothing it can view. Texts are clean (`lightningrl.sanitize`): what
agents send is stored without lone surrogates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Dialect, Enum, Float, LargeBinary, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

from lightningrl import wire
from lightningrl.errors import StoreError
from lightningrl.sanitize import DEEPEST, clean_json, clean_text, finite
from lightningrl.types import Array, IntArray, SamplingSettings

__all__ = [
    "Choice",
    "CleanText",
    "ColumnCodec",
    "Finite",
    "Floats",
    "Json",
    "LongJson",
    "LongText",
    "SpanId",
    "Wire",
    "as_number",
    "column_text",
    "count_tokens",
    "decode_advantages",
    "decode_many",
    "decode_output",
    "decode_sampling",
    "decode_tokens",
    "encode_advantages",
    "encode_json",
    "encode_tokens",
]

_COMPRESS_FROM = 200
"""Texts shorter than this (bytes) are kept as they are."""

_json = msgspec.json.Encoder(order="deterministic")
decode_sampling: Final = msgspec.json.Decoder(SamplingSettings).decode


def as_number(value: int) -> int:
    """Return a number that a database can be asked for: one beyond 64 bits becomes -1, which no attempt or step has."""
    return value if -(2**63) <= value < 2**63 else -1


def encode_tokens(ids: IntArray | Sequence[int]) -> bytes:
    """Width in bytes (2, 3 or 4) as the first byte, then that many bytes per token."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size == 0:
        return b"\x02"
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        odd = low if low < 0 else high
        raise StoreError(f"token id {odd} is out of range; an engine returns ids from 0 to 2**31 - 1")
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
    """Number of tokens in a column, without decoding it."""
    return (len(data) - 1) // data[0]


def decode_many(columns: Sequence[bytes]) -> list[NDArray[Any]]:
    """Decode several columns, at once where they are of one width."""
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


def encode_advantages(values: Array) -> bytes:
    """One number where a call's tokens share it (credit per call), else one per token; the first byte tells which."""
    array = np.asarray(values, dtype="<f4")
    if array.size and bool((array == array[0]).all()):
        return b"c" + array[:1].tobytes()
    return b"t" + array.tobytes()


def decode_advantages(data: bytes, length: int) -> Array:
    values = np.frombuffer(data, "<f4", offset=1)
    return np.full(length, values[0], np.float32) if data[:1] == b"c" else values


def column_text(text: str) -> str:
    """Clean a short text for a column: PostgreSQL's have no NUL."""
    return clean_text(text).replace("\0", "\ufffd")


def encode_text(text: str) -> bytes | None:
    """Compress where that pays; None for an empty text."""
    if not text:
        return None
    data = clean_text(text).encode()
    return b"z" + zlib.compress(data, 1) if len(data) >= _COMPRESS_FROM else b"p" + data


def decode_text(data: bytes) -> str:
    plain = zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:]
    return plain.decode()


def encode_json(value: Any, what: str) -> str:
    """Encode as deterministic JSON; `what` names the value in the error."""
    try:
        try:
            return _json.encode(value).decode()
        except UnicodeEncodeError:
            return _json.encode(clean_json(value, cut=True)).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise StoreError(
            f"{what} is not JSON ({error}); use dicts with string keys, lists, strings, numbers, booleans and None"
        ) from None


def decode_output(text: str) -> Any:
    """Decode the output of an agent; None in place of parts too deep to be sent on."""
    if not text:
        return None
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        return None
    return clean_json(value, cut=True) if text.count("[") + text.count("{") > DEEPEST else value


def encode_span(span_id: str) -> bytes | None:
    """Eight bytes for the 16 hexadecimal digits of a span id; anything else as text."""
    if not span_id:
        return None
    span_id = clean_text(span_id)
    with suppress(ValueError):
        if len(span_id) == 16:
            return bytes.fromhex(span_id)
    return b"s" + span_id.encode()


def decode_span(data: bytes) -> str:
    return data.hex() if len(data) == 8 else data[1:].decode()


# ------------------------------------------------------------------ column types


class ColumnCodec(TypeDecorator[Any]):
    """A value of Python's ↔ what a column holds of it; None is NULL, and NULL is `null`."""

    impl: TypeEngine[Any] | type[TypeEngine[Any]] = LargeBinary
    cache_ok = True

    def __init__(
        self,
        encode: Callable[[Any], Any],
        decode: Callable[[Any], Any],
        kind: TypeEngine[Any] | None = None,
        null: Any = None,
    ) -> None:
        """`kind`: what the column holds, bytes unless it is said."""
        super().__init__()
        self.impl = kind or self.impl
        self.encode: Final = encode
        self.decode: Final = decode
        self.null: Final = null

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else self.encode(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return the reader of a cell: one call of Python's, where SQLAlchemy's own way to `decode` has three."""
        driver = self.impl_instance.result_processor(dialect, coltype)
        decode, null = self.decode, self.null
        if driver is None:
            return lambda value: null if value is None else decode(value)
        return lambda value: null if value is None else decode(driver(value))


Floats: Final = ColumnCodec(
    lambda values: np.asarray(values, dtype="<f4").tobytes(), lambda data: np.frombuffer(data, "<f4")
)
"""float32 array ↔ little-endian bytes."""
LongText: Final = ColumnCodec(encode_text, decode_text, null="")
"""Text ↔ bytes, compressed where that pays; empty = NULL = empty."""
LongJson: Final = ColumnCodec(
    lambda value: encode_text(encode_json(value, "what a model was asked or answered")),
    lambda data: decode_output(decode_text(data)),
)
"""Any JSON ↔ bytes, compressed where that pays. Parts too deep to be sent on are None when read."""
CleanText: Final = ColumnCodec(column_text, str, Text())
"""Short text of an agent's, without lone surrogates and NUL."""
SpanId: Final = ColumnCodec(encode_span, decode_span)
"""16 hexadecimal digits ↔ 8 bytes."""
Finite: Final = ColumnCodec(finite, float, Float())
"""A float that an agent may have sent: NaN and infinity become 0."""


def Wire(kind: type[Any]) -> ColumnCodec:  # noqa: N802  (stands where a type does, as the next ones)
    """Make the type of a frozen type, kept as its wire's JSON, compressed where that pays."""
    return ColumnCodec(
        lambda value: encode_text(wire.encode(value).decode()),
        lambda data: wire.decode(decode_text(data).encode(), kind),
    )


def Json(kind: Any, what: str, empty: Any = None) -> ColumnCodec:  # noqa: N802
    """Make the type of a value kept as deterministic JSON; what is equal to `empty` is NULL, and NULL is `empty`."""
    return ColumnCodec(
        lambda value: None if value == empty else encode_json(value, what),
        msgspec.json.Decoder(kind).decode,
        Text(),
        null=empty,
    )


def Choice(kind: type[StrEnum]) -> Enum:  # noqa: N802
    """Make the type of a member of a StrEnum, stored by its value."""
    return Enum(kind, native_enum=False, length=32, values_callable=lambda members: [one.value for one in members])
