"""Redirection of this process: its HTTP clients send the agent's model calls to the gateway.

`send` is patched on the client *classes* (httpx, httpx2, requests, aiohttp), when the agent imports them; so clients
made at import time, SDKs, LangChain's cached clients and wrapped transports are all covered.
`ThreadPoolExecutor.submit` carries the context along. `Thread.start` does not: a long-lived thread would carry its
first rollout into later ones.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl_client.attribution.http_clients import HttpClients
from lightningrl_client.attribution.model_calls import ModelCalls

__all__ = ["Redirection", "installed_redirection"]


class Redirection(ModelCalls):
    """Model calls of this process's HTTP clients. `install` once, `uninstall` to restore the clients."""

    _patches: Patches | None = None

    def install(self) -> None:
        """Patch the client classes that are imported, and the others when they get imported."""
        if self._patches is not None:
            raise RuntimeError("this redirection is installed; install it once")
        self._patches = Patches()
        _installed.append(self)
        self._patches.wrap(ThreadPoolExecutor, "submit", submit_with_context)
        HttpClients(self).patch(self._patches)

    def uninstall(self) -> None:
        """Restore what `install` patched."""
        if self in _installed:
            _installed.remove(self)
        if self._patches is not None:
            self._patches.restore()
        self._patches = None


_installed: list[Redirection] = []
"""Patches are of the whole process, and so is this: whoever reports asks here what rollout it works for."""


def installed_redirection() -> Redirection | None:
    """Return this process's redirection; None = this process is no worker."""
    return _installed[-1] if _installed else None


def submit_with_context(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wrap `submit` of an executor: the job runs in its caller's context."""
    return wrapped(contextvars.copy_context().run, *args, **kwargs)
