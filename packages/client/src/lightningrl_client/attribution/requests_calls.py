"""Model calls of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightningrl.instrumentation import Patches
from lightningrl_client.attribution.model_calls import ModelCalls, is_sdk_retry

__all__ = ["RequestsCalls"]


class RequestsCalls:
    """Wrapper of `Session.send`."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    def patch(self, patches: Patches) -> None:
        """Wrap the session, now or when it gets imported."""
        patches.when_imported("requests", lambda module: patches.wrap(module.Session, "send", self._send))

    def _send(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["request"]
        body = request.body.encode() if isinstance(request.body, str) else request.body
        is_retry = is_sdk_retry(request.headers)
        call = self._calls.redirect(request.url, body if isinstance(body, bytes) else None, is_retry=is_retry)
        if call is None:
            return wrapped(*args, **kwargs)
        request.url = call.url
        call.rewrite(request.headers, self._calls.key_headers, closes=False)
        kwargs["proxies"] = {}  # they were chosen for the host that the agent named
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response
