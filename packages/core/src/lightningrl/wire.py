"""The frozen types are their own wire format: JSON, their token arrays as base64 of little-endian int32 or float32.
Values of tasks and agents are JSON: an array among them is a list.

A transition travels as the store keeps it: its prompt is what it adds to its parent's tokens, so a long history
travels once, and tools that are offered again are "=".

    chain   │ suffix₀ completion₀ suffix₁ completion₁ suffix₂ completion₂ │
    call 1  └──────── prompt ────────────┘└ completion ┘

Read back, a call whose parent is the end of a chain goes on with it, and every prompt is a view into its chain; a
second child starts a chain with a copy of what they share.
"""

from __future__ import annotations

import binascii
import threading
from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightningrl.sanitize import clean_json, to_plain
from lightningrl.types import IntArray, Trajectory, Transition

__all__ = ["assemble", "convert", "decode", "decode_trajectories", "encode", "encode_trajectories"]

T = TypeVar("T")

_BUILDING: Final = threading.Lock()
_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}
_AGAIN: Final = "="
"""In place of what a transition was offered: the same as the one before it."""


def encode(value: object) -> bytes:
    """A frozen type, or any JSON. Lone surrogates of a data set's are replaced. Raises NotPlain, a ValueError, for
    what JSON lacks."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    hook = _array_to_bytes if _has_arrays(cast("Hashable", type(first))) else _to_plain
    try:
        return msgspec.json.encode(value, enc_hook=hook)
    except UnicodeEncodeError:
        return msgspec.json.encode(clean_json(msgspec.to_builtins(value, enc_hook=hook)))


def decode(data: bytes, kind: type[T]) -> T:
    """Raises msgspec.MsgspecError with the place and the problem."""
    return cast("T", _decoder(kind).decode(data))


def convert(value: Any, kind: Any) -> Any:
    """Parsed JSON to a type. Raises msgspec.ValidationError with the place and the problem."""
    _decoder(kind)  # what msgspec keeps of the type is there, then
    return msgspec.convert(value, kind, dec_hook=_bytes_to_array)


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """A JSON list."""
    return encode([_packed(trajectory) for trajectory in trajectories])


def decode_trajectories(data: bytes) -> tuple[Trajectory, ...]:
    """Decode the bytes of `encode_trajectories`. Raises msgspec.MsgspecError."""
    return tuple(_unpacked(trajectory) for trajectory in decode(data, tuple[Trajectory, ...]))


def _packed(trajectory: Trajectory) -> Trajectory:
    ends = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in trajectory.transitions}
    calls: list[Transition] = []
    offered = ""
    for call in trajectory.transitions:
        is_again = bool(offered) and call.offered == offered
        shared = 0 if call.parent_id is None else ends[call.parent_id]
        calls.append(_without(call, shared, _AGAIN if is_again else call.offered) if shared or is_again else call)
        offered = call.offered
    return replace(trajectory, transitions=tuple(calls))


def _without(call: Transition, shared: int, offered: str) -> Transition:
    """A copy that lacks the prompt's first tokens; `dataclasses.replace` takes five times as long."""
    copy = object.__new__(Transition)
    for set_field, value in zip(_SET_FIELDS, _FIELDS(call), strict=True):
        set_field(copy, value)
    object.__setattr__(copy, "prompt_ids", call.prompt_ids[shared:])
    object.__setattr__(copy, "offered", offered)
    return copy


_FIELDS = attrgetter(*Transition.__slots__)
_SET_FIELDS = tuple(Transition.__dict__[name].__set__ for name in Transition.__slots__)


def _unpacked(trajectory: Trajectory) -> Trajectory:
    """The same, whose calls are given their whole prompts: nobody else has seen them yet."""
    calls = trajectory.transitions
    position: dict[str | None, int | None] = {None: None}
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        if call.parent_id not in position:
            problem = f"transition {call.id!r} goes on from {call.parent_id!r}, which does not come before it"
            raise msgspec.ValidationError(f"{problem}; send an attempt's transitions whole and in order")
        parents.append(position[call.parent_id])
        position[call.id] = index
    tokens = assemble(
        [(parent, call.prompt_ids, call.completion_ids) for parent, call in zip(parents, calls, strict=True)]
    )
    offered = ""
    for call, (prompt, completion) in zip(calls, tokens, strict=True):
        if call.offered == _AGAIN:
            object.__setattr__(call, "offered", offered)
        offered = call.offered
        object.__setattr__(call, "prompt_ids", prompt)
        object.__setattr__(call, "completion_ids", completion)
    return trajectory


def assemble(calls: Sequence[tuple[int | None, NDArray[Any], NDArray[Any]]]) -> list[tuple[IntArray, IntArray]]:
    """From (position of the parent, suffix, completion) to (prompt, completion), as read-only int32 arrays that
    share memory."""
    chains: list[list[NDArray[Any]]] = []
    lengths: list[int] = []
    tails: list[int] = []  # of each chain, the call it ends with
    places: list[tuple[int, int, int, int]] = []  # of each call: chain, parts, end of prompt, end of completion
    for position, (parent, suffix, completion) in enumerate(calls):
        if parent is not None and tails[places[parent][0]] == parent:
            chain = places[parent][0]
        else:
            chain = len(chains)
            if parent is None:
                chains.append([])
                lengths.append(0)
            else:
                shared, parts, _, end = places[parent]
                chains.append(chains[shared][:parts])
                lengths.append(end)
            tails.append(position)
        prompt_end = lengths[chain] + len(suffix)
        end = prompt_end + len(completion)
        chains[chain] += (suffix, completion)
        lengths[chain], tails[chain] = end, position
        places.append((chain, len(chains[chain]), prompt_end, end))
    tokens = [np.concatenate(parts, dtype=np.int32, casting="unsafe") for parts in chains]
    for array in tokens:
        array.flags.writeable = False
    return [(tokens[chain][:prompt_end], tokens[chain][prompt_end:end]) for chain, _, prompt_end, end in places]


@lru_cache
def _has_arrays(kind: Any) -> bool:
    """True where a type has fields for tokens, its own or those of what it holds."""
    if get_origin(kind) is np.ndarray:
        return True
    is_record = is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return any(map(_has_arrays, get_type_hints(kind).values() if is_record else get_args(kind)))


def _array_to_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype("<f4" if value.dtype.kind == "f" else "<i4", copy=False).tobytes()
    return _to_plain(value)


def _to_plain(value: Any) -> Any:
    return to_plain(value, "a value")


def _bytes_to_array(kind: Any, value: Any) -> NDArray[Any]:
    if not isinstance(value, str):
        raise ValueError("an array is base64 of its little-endian bytes")
    return np.frombuffer(binascii.a2b_base64(value, strict_mode=True), _dtype(kind))


@lru_cache
def _dtype(kind: Any) -> str:
    return "<f4" if get_args(get_args(kind)[1]) == (np.float32,) else "<i4"


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _BUILDING:  # msgspec crashes where a thread reads what another one is still writing to a class
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.json.Decoder(kind, dec_hook=_bytes_to_array)
        return _DECODERS[kind]
