"""State keys: which calls of a task's rollouts faced the same decision. The state after a call is the next call's.

| key             | two calls are in the same state where                                                       |
|-----------------|---------------------------------------------------------------------------------------------|
| `"prompt"`      | the policy saw the same prompt, token for token                                             |
| `"observation"` | their prompts add the same tokens to those of the call they continue (at first: all tokens) |
| `"tool_result"` | the last tool results were the same, less what `normalize` strips, and as many calls ago    |
| `"file.py:key"` | the user's function, called with the trajectory, returns equal hashable values for them     |

A transition has its prompt's tokens and not its text, so only results of tools can be rid of timestamps and ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, PluginError
from lightningrl.loading import is_reference, load_callable
from lightningrl.types import Trajectory
from lightningrl_credit.rewards.tools import tools_of_calls

__all__ = ["KEYS", "StateKey", "find_key", "normalize", "state_keys"]

StateKey = Callable[[Trajectory], Sequence[Hashable]]
"""Gives each call of a trajectory a value that names its state."""

# Each starts with a class of characters, by which `re` skips the others quickly; `(?<! \w. )`: a word begins there.
_DIGITS = re.compile(
    r"""[0-9] (?<! \w. ) (?:
          [0-9]{3}-[0-9]{2}-[0-9]{2}                                            # 2026-11-25T18:04:05.123+01:00
              (?: [T\ ][0-9]{2}:[0-9]{2} (?: :[0-9]{2} (?: [.,][0-9]+ )? )? (?: Z | [+-][0-9]{2}:?[0-9]{2} )? )?
        | [0-9]?:[0-9]{2}:[0-9]{2} (?: [.,][0-9]+ )? \b                         # 18:04:05.123
        | (?<= 1 ) [0-9]{9} (?: [0-9]{3} | \.[0-9]+ )? \b                      # (milli)seconds since 1970
        | [0-9]* (?: \.[0-9]+ )? \ ? (?: ms | milliseconds? | s | secs? | seconds? ) \b      # 12.3 ms
        | (?: (?<= [sS]tep[\ :=\#]. ) | (?<= [tT]urn[\ :=\#]. ) | (?<= [rR]ound[\ :=\#]. )
            | (?<= [sS]tep[:\ ][\ \#]. ) | (?<= [tT]urn[:\ ][\ \#]. ) | (?<= [rR]ound[:\ ][\ \#]. )
            | (?<= ttempt[\ :=\#]. ) | (?<= ttempt[:\ ][\ \#]. ) | (?<= teration[\ :=\#]. ) | (?<= [tT]ry[\ :=\#]. )
          ) [0-9]* (?: \ ? (?: / | of ) \ ? [0-9]+ )?                          # the numbers of step 3 of 10
    )""",
    re.VERBOSE,
)
_HEX = re.compile(
    r"""[0-9a-fA-F] (?<! \w. ) (?:
          (?<= 0 ) x[0-9a-fA-F]+                                                                # an address
        | (?= [0-9a-fA-F]{7} ) (?:
              [0-9a-fA-F]{7}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}       # a UUID
            | (?: (?<= [0-9] ) (?= [0-9]*[a-fA-F] ) | (?<= [a-fA-F] ) (?= [a-fA-F]*[0-9] ) )
              [0-9a-fA-F]{11,}                                                                  # a hash
        )
    ) \b""",
    re.VERBOSE,
)
_SHORTEST_HASH = 12
_ID_PREFIXES = ("call_", "chatcmpl-", "toolu_", "run_", "req_", "msg_", "id_")
_IDS = re.compile(rf"\b(?:{'|'.join(_ID_PREFIXES)})(?=\w*[0-9])\w{{6,}}")  # call_9sK2mQ4x


def normalize(text: str) -> str:
    """Strip from a text all that changes from run to run while the state stays.

    Dates and times, durations in seconds, UUIDs, hashes, addresses and call ids, numbers of steps, turns, rounds,
    tries, attempts and iterations; runs of white space are one space.
    """
    words = text.split()
    text = _DIGITS.sub("", " ".join(words))
    longest = max(map(len, words), default=0)
    if longest >= _SHORTEST_HASH or "0x" in text:
        text = _HEX.sub("", text)
    if any(prefix in text for prefix in _ID_PREFIXES):
        text = _IDS.sub("", text)
    return " ".join(text.split())


def by_prompt(trajectory: Trajectory) -> list[Hashable]:
    return [call.prompt_ids.tobytes() for call in trajectory.transitions]


def by_observation(trajectory: Trajectory) -> list[Hashable]:
    seen = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in trajectory.transitions}
    return [call.prompt_ids[seen.get(call.parent_id or "", 0) :].tobytes() for call in trajectory.transitions]


def by_tool_result(trajectory: Trajectory) -> list[Hashable]:
    keys: list[Hashable] = []
    last: tuple[tuple[str, str], ...] = ()
    since = 0
    for tools in tools_of_calls(trajectory):
        keys.append((last, since))
        since += 1
        if tools:
            last, since = tuple(sorted((tool.name, normalize(tool.result)) for tool in tools)), 0
    return keys


KEYS: Mapping[str, StateKey] = {"prompt": by_prompt, "observation": by_observation, "tool_result": by_tool_result}


def find_key(key: str | StateKey, folder: Path | str = ".") -> StateKey:
    """Find a key by its name, a user's by `"file.py:name"`, or take the function itself. Raises ConfigError."""
    if callable(key):
        return key
    if isinstance(key, str) and is_reference(key):
        return load_callable(key, folder)
    if key not in KEYS:
        raise ConfigError(
            f"no state key named {key!r}; there are: {', '.join(KEYS)}, or your own function as 'file.py:name'"
        )
    return KEYS[key]


def state_keys(trajectory: Trajectory, key: StateKey) -> Sequence[Hashable]:
    """State key of each call. Raises PluginError where they are too few, too many, or cannot be compared."""
    keys: Any = key(trajectory)
    name, calls = getattr(key, "__name__", type(key).__name__), len(trajectory.transitions)
    of = f"rollout {trajectory.rollout_id!r}"
    if not isinstance(keys, list | tuple):
        raise PluginError(
            f"state key {name!r} returned {type(keys).__name__} for {of}; return a list with one key for each call"
        )
    if len(keys) != calls:
        raise PluginError(
            f"state key {name!r} returned {len(keys)} keys for {of} with {calls} calls; return one for each"
        )
    for number, value in enumerate(keys):
        try:
            hash(value)
        except TypeError:
            raise PluginError(
                f"state key {name!r} returned a {type(value).__name__} for call {number} of {of}, which is not "
                "hashable; return a text, a number or a tuple of them"
            ) from None
    return keys
