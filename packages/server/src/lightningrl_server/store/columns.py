"""Column types, and the encoding of values in them: token ids, logprobs, texts, JSON, span ids.

All numbers are little-endian; decoding copies nothing it can view. Texts are clean (`lightningrl.sanitize`): what
agents send is stored without lone surrogates.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Dialect, Enum, Float, LargeBinary, Text
from sqlalchemy.types import TypeDecorator

from lightningrl import wire
from lightningrl.errors import StoreError
from lightningrl.sanitize import DEEPEST, clean_json, clean_text, finite
from lightningrl.types import Array, IntArray, SamplingSettings

__all__ = [
    "Choice",
    "CleanText",
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
_sampling = msgspec.json.Decoder(SamplingSettings)


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
        raise StoreError(
            f"token id {low if low < 0 else high} is out of range; an engine returns ids from 0 to 2**31 - 1"
        )
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
    """One number where it is constant over the call's tokens, as credit per call is, else one per token; the first byte
    tells which."""
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


def encode_text(text: str | None) -> bytes | None:
    if not text:
        return None
    data = clean_text(text).encode()
    return b"z" + zlib.compress(data, 1) if len(data) >= _COMPRESS_FROM else b"p" + data


def decode_text(data: bytes | None) -> str:
    if data is None:
        return ""
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


def decode_json(text: str | bytes) -> Any:
    return msgspec.json.decode(text)


def decode_output(text: str) -> Any:
    """Decode the output of an agent; None in place of parts too deep to be sent on."""
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


# ------------------------------------------------------------------ column types


class Floats(TypeDecorator[Array]):
    """float32 array ↔ little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Array | None, dialect: Dialect) -> bytes | None:
        return None if value is None else np.asarray(value, dtype="<f4").tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Array | None:
        return None if value is None else np.frombuffer(value, "<f4")


class LongText(TypeDecorator[str]):
    """Text ↔ bytes, compressed where that pays; empty = NULL = empty."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return encode_text(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str:
        return decode_text(value)


class LongJson(TypeDecorator[Any]):
    """Any JSON ↔ bytes, compressed where that pays; None = NULL. Parts too deep to be sent on are None when read."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else encode_text(encode_json(value, "what a model was asked or answered"))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else decode_output(decode_text(value))


class Wire(TypeDecorator[Any]):
    """A frozen type ↔ its wire's JSON, compressed where that pays."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.kind: Final = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else encode_text(wire.encode(value).decode())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else wire.decode(decode_text(value).encode(), self.kind)


class CleanText(TypeDecorator[str]):
    """Short text of an agent's, without lone surrogates and NUL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else column_text(value)


class SpanId(TypeDecorator[str]):
    """16 hexadecimal digits ↔ 8 bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return encode_span(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return decode_span(value)


class Json(TypeDecorator[Any]):
    """A value of one type ↔ deterministic JSON; None and what is equal to `empty` are NULL, and NULL is `empty`."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any, what: str, empty: Any = None) -> None:
        super().__init__()
        self.what: Final = what
        self.empty: Final = empty
        self._decode = msgspec.json.Decoder(kind).decode

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None or value == self.empty else encode_json(value, self.what)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return self.empty if value is None else self._decode(value)


class Finite(TypeDecorator[float]):
    """A float that an agent may have sent: NaN and infinity become 0."""

    impl = Float
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        return None if value is None else finite(value)


def Choice(kind: type[StrEnum]) -> Enum:  # noqa: N802  (stands where a type does)
    """Make the type of a member of a StrEnum, stored by its value."""
    return Enum(
        kind,
        native_enum=False,
        create_constraint=False,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )
