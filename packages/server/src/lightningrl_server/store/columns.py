"""Column types: a value goes into a row and comes out of it as Python has it (`lightningrl_server.store.codec` has the bytes)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import Dialect, Enum, Float, LargeBinary, Text
from sqlalchemy.types import TypeDecorator

from lightningrl import wire
from lightningrl.sanitize import finite
from lightningrl.types import Array
from lightningrl_server.store import codec

__all__ = ["Choice", "CleanText", "Finite", "Floats", "Json", "LongJson", "LongText", "SpanId", "Wire"]


class Floats(TypeDecorator[Array]):
    """float32 array ↔ little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Array | None, dialect: Dialect) -> bytes | None:
        return None if value is None else codec.encode_floats(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Array | None:
        return None if value is None else codec.decode_floats(value)


class LongText(TypeDecorator[str]):
    """Text ↔ bytes, compressed where that pays; empty = NULL = empty."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return codec.encode_text(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str:
        return codec.decode_text(value)


class LongJson(TypeDecorator[Any]):
    """Any JSON ↔ bytes, compressed where that pays; None = NULL. What lies too deep to be sent on is None when it is read."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else codec.encode_text(codec.encode_json(value, "what a model was asked or answered"))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else codec.decode_output(codec.decode_text(value))


class Wire(TypeDecorator[Any]):
    """A frozen type ↔ its wire's JSON, compressed where that pays."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.kind: Final = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else codec.encode_text(wire.encode(value).decode())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else wire.decode(codec.decode_text(value).encode(), self.kind)


class CleanText(TypeDecorator[str]):
    """Short text of an agent's, without lone surrogates and NUL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else codec.column_text(value)


class SpanId(TypeDecorator[str]):
    """16 hexadecimal digits ↔ 8 bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return codec.encode_span(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return codec.decode_span(value)


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
        return None if value is None or value == self.empty else codec.encode_json(value, self.what)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return self.empty if value is None else self._decode(value)


class Finite(TypeDecorator[float]):
    """A float that an agent may have sent: NaN and infinity become 0, on both ways."""

    impl = Float
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        return None if value is None else finite(value)

    def process_result_value(self, value: float | None, dialect: Dialect) -> float | None:
        return None if value is None else finite(value)


def Choice(kind: type[StrEnum]) -> Enum:  # noqa: N802  (stands where a type does)
    """A member of a StrEnum, by its value."""
    return Enum(
        kind, native_enum=False, create_constraint=False, length=32, values_callable=lambda members: [member.value for member in members]
    )
