"""Errors a person reads: one sentence that says what, which, and what next."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightningrl.keys import Mask

__all__ = [
    "BackendError",
    "ConfigError",
    "ContextOverflow",
    "EngineUnavailable",
    "GrammarError",
    "Interruption",
    "JudgeError",
    "LightningError",
    "PluginError",
    "RewardError",
    "RunFolderError",
    "ServerError",
    "StoreError",
    "describe_raised",
    "iterate_causes",
]

_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class LightningError(Exception):
    """Base of everything we raise on purpose. The command line prints its text alone and exits with `exit_code`."""

    exit_code: int = 1


class Interruption(LightningError):
    """A person stopped the run; nothing went wrong."""

    exit_code = 130


class ConfigError(LightningError):
    """The recipe cannot be run as written: one sentence, or one for each thing that is wrong with it."""

    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class PluginError(LightningError):
    """A plugin is unknown, broken, duplicated or misspelt."""

    exit_code = 2


class RunFolderError(LightningError):
    """The run folder is in use, incomplete, or belongs to another recipe."""


class StoreError(LightningError):
    """The store refused or could not keep something."""


class ServerError(LightningError):
    """The Lightning Server refused a request or cannot be reached."""


class EngineUnavailable(LightningError):
    """No engine serves the policy, or it went away in mid-call."""


class ContextOverflow(LightningError):
    """A prompt leaves no room for a completion."""


class RewardError(LightningError):
    """A reward raised, timed out, or returned no finite number."""


class JudgeError(LightningError):
    """A judge gave no answer, or may not be asked any more."""


class BackendError(LightningError):
    """A trainer backend cannot do what the recipe asks."""


class GrammarError(BackendError):
    """An engine cannot sample within a grammar."""


def describe_raised(error: BaseException) -> str:
    """An error of a user's own code, `KeyError: 'gold' (reward.py, line 12)`: the innermost line that is neither
    ours nor a library's. The place is left out where there is none, and of errors that we raise on purpose. Keys in
    it are masked."""
    place = ""
    for frame, line in () if isinstance(error, LightningError) else traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if not file.startswith((*_LIBRARIES, "<")) and not module.startswith("lightningrl"):
            place = f" ({Path(file).name}, line {line})"
    try:
        message = str(error)
    except Exception as problem:  # noqa: BLE001  the user's own code, too
        message = f"which cannot be shown: {type(problem).__name__}"
    return Mask.of_variables(os.environ).text(f"{type(error).__name__}: {message}{place}")


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what led to it, members of groups included, each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
