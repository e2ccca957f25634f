"""Model calls of aiohttp, which frameworks use alone or as a transport of httpx."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lightningrl.instrumentation import Patches
from lightningrl_client.attribution.model_calls import CALL_ID, OUR_HEADERS, ModelCalls

__all__ = ["AiohttpCalls"]


class AiohttpCalls:
    """Wrapper of `ClientSession._request`."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    def patch(self, patches: Patches) -> None:
        """Wrap the session, now or when it gets imported."""
        patches.when_imported("aiohttp", lambda module: patches.wrap(module.ClientSession, "_request", self._send))

    async def _send(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = kwargs.get("headers") or ()
        if not isinstance(given, Mapping):
            kwargs["headers"] = given = list(given)  # of pairs
        if len(args) < 2 or CALL_ID in {name.lower() for name in dict(given)}:
            return await wrapped(*args, **kwargs)  # the transport of an httpx client that has been redirected already
        method, url, *rest = args
        call = self._calls.redirect(str(instance._build_url(url)), body_of(kwargs))
        if call is None:
            return await wrapped(*args, **kwargs)
        key_headers = self._calls.key_headers
        replaced = {"authorization", "host", "connection", *OUR_HEADERS, *key_headers}
        headers: dict[str, str] = {name: value for name, value in dict(given).items() if name.lower() not in replaced}
        call.rewrite(headers, key_headers, closes=self._calls.closes_connections())
        # The session's own default headers cannot be taken away, only overridden.
        key = headers["Authorization"].removeprefix("Bearer ")
        headers.update({name: key for name in key_headers if name in instance.headers})
        kwargs |= {"headers": headers, "auth": None, "proxy": None}
        with call.sent() as note_status:
            response = await wrapped(method, type(instance._build_url(url))(call.url), *rest, **kwargs)
            note_status(response.status)
        return response


def body_of(kwargs: Mapping[str, Any]) -> bytes | None:
    """The body's bytes; None where they cannot be known before it is sent."""
    if kwargs.get("json") is not None:
        return json.dumps(kwargs["json"], default=repr).encode()
    data = kwargs.get("data")
    if data is None:
        return b""
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else None
