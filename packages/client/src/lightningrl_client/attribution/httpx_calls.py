"""Model calls of httpx and httpx2: the OpenAI and Anthropic SDKs, and most frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightningrl.instrumentation import Patches
from lightningrl_client.attribution.model_calls import ModelCalls, RedirectedCall, is_sdk_retry

__all__ = ["HttpxCalls"]


class HttpxCalls:
    """Wrappers of `send` and of the choice of a proxy."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    def patch(self, patches: Patches) -> None:
        """Wrap the clients, now or when they get imported."""

        def patch(module: Any) -> None:
            for client, send in ((module.Client, self._send), (module.AsyncClient, self._send_async)):
                patches.wrap(client, "send", send)
                if hasattr(client, "_transport_for_url"):
                    patches.wrap(client, "_transport_for_url", self._choose_transport)

        for name in ("httpx", "httpx2"):
            patches.when_imported(name, patch)

    def _send(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._rewrite(args[0] if args else kwargs["request"], closes=False)
        if call is None:
            return wrapped(*args, **kwargs)
        kwargs["auth"] = None  # the client's own scheme would replace our key
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    async def _send_async(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self._rewrite(args[0] if args else kwargs["request"], closes=self._calls.closes_connections())
        if call is None:
            return await wrapped(*args, **kwargs)
        kwargs["auth"] = None
        with call.sent() as note_status:
            response = await wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    def _rewrite(self, request: Any, *, closes: bool) -> RedirectedCall | None:
        call = self._calls.redirect(str(request.url), body_of(request), is_retry=is_sdk_retry(request.headers))
        if call is not None:
            request.url = type(request.url)(call.url)
            call.rewrite(request.headers, self._calls.key_headers, closes=closes)
        return call

    def _choose_transport(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Ask our server without the client's proxy, which was chosen for the host that the agent named."""
        transport, url = wrapped(*args, **kwargs), args[0] if args else kwargs["url"]
        is_httpx = type(transport).__name__ in ("HTTPTransport", "AsyncHTTPTransport")
        is_ours = self._calls.is_own(url.host, url.port or (443 if url.scheme == "https" else 80))
        return instance._transport if is_httpx and is_ours else transport


def body_of(request: Any) -> bytes | None:
    """The body's bytes; None while they have not been read."""
    try:
        return bytes(request.content)
    except RuntimeError:  # RequestNotRead of httpx or httpx2
        return None
