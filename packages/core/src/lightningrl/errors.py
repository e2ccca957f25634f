"""Errors a person reads: one sentence that says what, which, and what next."""

from __future__ import annotations

import os
import socket
import sysconfig
import traceback
from collections.abc import Collection, Iterator
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
    "is_of_world",
    "iterate_causes",
    "status_of",
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


BUSY_STATUSES: Final = frozenset({429, 502, 503, 504, 507, 529})
"""Answers of a host that limits rates, is overloaded, has nobody behind it, or no room on its disk."""
NETWORK_ERRORS: Final = (
    "socket.gaierror",
    "ssl.SSLError",
    "httpx.NetworkError",
    "httpx.TimeoutException",
    "httpx.RemoteProtocolError",
    "httpx.ProxyError",
    "httpcore.NetworkError",
    "httpcore.TimeoutException",
    "httpcore.RemoteProtocolError",
    "requests.ConnectionError",
    "requests.Timeout",
    "requests.ChunkedEncodingError",
    "urllib3.ProtocolError",
    "urllib3.TimeoutError",
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
)
"""Exceptions of a network, beside Python's own ConnectionError, as `outcomes.infrastructure` would name them."""


def is_of_world(error: BaseException, names: Collection[str] = ()) -> bool:
    """True if the world caused an error of a user's code, and not what a policy wrote: the network failed, a host
    limits rates or is busy, or it is one of the `names`. A host that does not exist was made up."""
    causes = list(iterate_causes(error))
    if any(is_named(cause, names) or status_of(cause) in BUSY_STATUSES for cause in causes):
        return True
    if any(isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME for cause in causes):
        return False
    return any(
        isinstance(cause, ConnectionError) or is_named(cause, NETWORK_ERRORS) or _is_late_socket(cause)
        for cause in causes
    )


def is_named(error: BaseException, names: Collection[str]) -> bool:
    """True if one of its classes has one of the names. The module may be one above: `psycopg.OperationalError` names
    `psycopg.errors.OperationalError`; a name without a module is that of any class, of any module."""
    for kind in type(error).__mro__:
        for name in names:
            module, _, last = name.rpartition(".")
            if last == kind.__name__ and f"{kind.__module__}.".startswith(f"{module}." if module else ""):
                return True
    return False


def status_of(error: BaseException) -> int | None:
    """HTTP status that an SDK's exception carries."""
    answer = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(answer, "status_code", None)
    status = status or getattr(error, "status", None)  # aiohttp's, urllib's
    return status if isinstance(status, int) else None


def _is_late_socket(error: BaseException) -> bool:
    """True of a read that took too long, which is a plain TimeoutError, as that of any time limit is."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TimeoutError) and modules[-1:] in (["socket"], ["ssl"])
