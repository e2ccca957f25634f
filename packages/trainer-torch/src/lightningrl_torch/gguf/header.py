"""The head of a GGUF file: its metadata and where each tensor lies, read without the tensors.

"GGUF" version(u32) tensors(u64) keys(u64) │ key type value … │ name dims type offset … │ padding │ tensors
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lightningrl.errors import ConfigError

__all__ = ["GgufHeader", "StoredTensor", "read_header"]

_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by GGUF's number of the type."""
_STRING, _ARRAY = 8, 9
_MOST_ITEMS: Final = 2**22
_LONGEST: Final = 2**27
"""Bytes of a head; those with the largest vocabularies have some 2**25."""
_MOST_NESTED: Final = 4
_MOST_DIMENSIONS: Final = 8
_TEXTS: Final = (
    "general.architecture",
    "general.type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Place of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: rows first."""
    type: GGMLQuantizationType
    start: int
    """First byte, counted from the beginning of the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of a file."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture: `get("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @cached_property
    def parameters(self) -> int:
        """Number of weights; `rope_freqs` are none."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values() if not tensor.name.startswith("rope_"))

    @cached_property
    def precision(self) -> str:
        """The type that most of the weights have: `Q4_1`, `F16`."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.type.name] += prod(tensor.shape)
        return sizes.most_common(1)[0][0] if sizes else "F32"

    @property
    def dtype(self) -> str:
        """Dtype that the folder's weights have: bfloat16 where the file's do, else float32, which holds any other."""
        types = {tensor.type for tensor in self.tensors.values() if len(tensor.shape) > 1}
        return "bfloat16" if types == {GGMLQuantizationType.BF16} else "float32"


class _Bytes:
    """Reads values one after the other. Raises EOFError beyond the end."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.place = 0

    def take(self, count: int) -> bytes:
        if self.place + count > len(self._data):
            raise EOFError
        if self.place + count > _LONGEST:
            raise ValueError
        taken: bytes = self._data[self.place : self.place + count]
        self.place += count
        return taken

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        if count > _MOST_ITEMS:
            raise ValueError
        form = f"<{count}{letter}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return _shortest(self.number(_NUMBERS[kind]), kind)
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > _MOST_NESTED:
            raise ValueError
        inner, count = self.numbers("I", 1)[0], self.number("Q")
        if inner in _NUMBERS:
            return list(self.numbers(_NUMBERS[inner], count))
        if count > _MOST_ITEMS:
            raise ValueError
        return [self.value(inner, depth + 1) for _ in range(count)]


def read_header(file: Path) -> GgufHeader:
    """Read the head of a file. Raises ConfigError for a file that is torn, in parts, or none of a text model."""
    _refuse_parts(file)
    try:
        with file.open("rb") as opened:
            if file.stat().st_size < 24:
                raise EOFError
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parse(file, _Bytes(data), len(data))
    except OSError as error:
        raise ConfigError(f"model file {str(file)!r} cannot be read: {error.strerror}; give another") from error
    except EOFError:
        raise ConfigError(
            f"model file {str(file)!r} ends too early: it was not copied or fetched whole; fetch it again"
        ) from None
    except (ValueError, struct.error, UnicodeDecodeError):
        raise ConfigError(f"model file {str(file)!r} is damaged: its head cannot be read; fetch it again") from None
    _refuse_others(header)
    return header


def _parse(file: Path, data: _Bytes, size: int) -> GgufHeader:
    if data.take(4) != b"GGUF":
        raise ConfigError(f"model file {str(file)!r} is no GGUF file: it does not begin with 'GGUF'; give another")
    version, tensor_count, key_count = data.number("I"), data.number("Q"), data.number("Q")
    if version not in (2, 3):
        raise ConfigError(
            f"model file {str(file)!r} is of GGUF version {version}; versions 2 and 3, little-endian, are read: "
            "convert the model again"
        )
    metadata = {}
    for _ in range(key_count):
        key = data.text()
        metadata[key] = data.value(data.number("I"))
    listed = list(_list_tensors(data, tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(
            f"model file {str(file)!r} aligns its tensors to {alignment!r} bytes, which is no power of two; convert "
            "the model again"
        )
    start = -(-data.place // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in listed:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError
        count = prod(shape) // block * block_bytes
        tensors[name] = StoredTensor(name=name, shape=shape, type=kind, start=start + offset, size=count)
        if start + offset + count > size:
            raise EOFError
    if start + sum(tensor.size for tensor in tensors.values()) > size:
        raise ValueError  # tensors that lie over each other: a small file would become a large model
    return GgufHeader(file=file, metadata=metadata, tensors=tensors)


def _list_tensors(data: _Bytes, count: int) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]:
    for _ in range(count):
        name, dimensions = data.text(), data.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError
        shape = tuple(reversed(data.numbers("Q", dimensions)))
        yield name, shape, GGMLQuantizationType(data.number("I")), data.number("Q")


def _shortest(value: Any, kind: int) -> Any:
    """A 32-bit float as the shortest decimal that it stands for: 1e-05, not 9.999999747378752e-06."""
    if kind != 6:
        return value
    return float(str(np.float32(value)))


def _refuse_parts(file: Path) -> None:
    if (part := _PART.search(file.name)) is not None:
        whole = file.name[: part.start()] + ".gguf"
        raise ConfigError(
            f"model file {file.name!r} is part {int(part[1])} of {int(part[2])}; merge them with llama.cpp's "
            f"`llama-gguf-split --merge {file.name} {whole}` and name {whole!r}"
        )


def _refuse_others(header: GgufHeader) -> None:
    """Raise ConfigError for a file that is no whole text model."""
    file, metadata = header.file, header.metadata
    for key in _TEXTS:
        if not isinstance(text := metadata.get(key, ""), str):
            raise ConfigError(
                f"model file {str(file)!r} has {str(text)[:40]} for its {key}, which must be a text; convert it again"
            )
    kind = metadata.get("general.type", "model")
    if "general.architecture" not in metadata:
        raise ConfigError(f"model file {str(file)!r} does not say its architecture; convert the model again")
    if header.architecture == "clip" or kind == "mmproj":
        raise ConfigError(
            f"model file {str(file)!r} is a projector of images (mmproj), not a model; name the model's own file"
        )
    if kind not in ("model", "") or not header.tensors:
        raise ConfigError(
            f"model file {str(file)!r} holds {kind if header.tensors else 'a vocabulary alone'!r}, not a model; "
            "name the model's own file"
        )
    split = metadata.get("split.count", 0)
    if not isinstance(split, int) or split > 1:
        raise ConfigError(
            f"model file {str(file)!r} is one of {split!r} parts; merge them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
