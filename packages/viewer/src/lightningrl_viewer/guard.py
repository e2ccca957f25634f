"""Guard of the pages: they are for somebody on this machine who was given the link.

    /?key=VIEW KEY ─► 303 to / with a cookie, so that the key leaves the address bar ─► later requests show the cookie

A page of another site cannot ask (SameSite, Origin), nor can one whose name was pointed at this machine (Host). GET and
HEAD alone are answered; where tags, notes and deletion are offered, so is a form of these pages, which shows the
cookie, its Origin and the pages' token.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "form_token"]

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_SAID: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with none at all a browser says `Origin: null` of a form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def form_token(key: str) -> str:
    """Return the token that forms of the pages carry: whoever knows it has read a page."""
    return hmac.new(key.encode(), b"lightningrl view form", hashlib.sha256).hexdigest()


class Guard:
    """Wraps the viewer's routes."""

    def __init__(self, app: ASGIApp, *, key: str, may_write: bool = False) -> None:
        self._app = app
        self._may_write = may_write
        self._key = key.encode()
        self.cookie = "lightningrl-view-" + hashlib.sha256(self._key).hexdigest()[:12]
        """Its name: all ports of a machine share their cookies, so each run has one of its own."""
        self._value = hmac.new(self._key, b"lightningrl view cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the viewer answers HTTP only, not {scope['type']!r}")

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SAID.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refuse(scope)
        await (refusal or self._app)(scope, receive, say)

    def _refuse(self, scope: Scope) -> Response | None:
        """Return the refusal; None = go on."""
        headers = Headers(scope=scope)
        if not _is_here(scope, headers):
            tunnel = "ssh -L PORT:127.0.0.1:PORT HOST"
            return _say(403, f"the viewer answers on this machine only; from elsewhere, forward its port: {tunnel}")
        if scope["method"] not in {"GET", "HEAD"} and not (self._may_write and scope["method"] == "POST"):
            return _say(405, "the viewer only shows; it takes GET and HEAD")
        if scope["method"] == "POST" and not _is_own_form(headers):
            return _say(403, "a form is taken from these pages only; open the page, and send it from there")
        query = QueryParams(scope.get("query_string", b""))
        if "key" in query:
            return self._exchange(scope, query)
        if not hmac.compare_digest(self._shown(headers).encode(), self._value.encode()):
            link = "the link that was printed by `lightningrl view` or `lightningrl train`"
            return _say(403, f"open {link}: it has the key to this run")
        return None

    def _exchange(self, scope: Scope, query: QueryParams) -> Response:
        if not hmac.compare_digest(query["key"].encode("utf-8", "replace"), self._key):
            return _say(403, "this key is of another run; open the link that was printed last")
        rest = [(name, value) for name, value in query.multi_items() if name != "key"]
        path = scope["path"] if scope["path"].startswith("/") and not scope["path"].startswith("//") else "/"
        # a root path of a mount is part of the path
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, status_code=303)
        answer.set_cookie(
            self.cookie, self._value, path=scope.get("root_path", "") or "/", httponly=True, samesite="strict"
        )
        return answer

    def _shown(self, headers: Headers) -> str:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return cookie.value if cookie else ""


def _is_here(scope: Scope, headers: Headers) -> bool:
    """True where it came from this machine, was sent to a name of this machine, and by no page of another site."""
    client = scope.get("client")
    if client is not None and _bare(client[0]) not in _LOOPBACK:
        return False
    host = headers.get("host", "")
    if _hostname(f"//{host}") not in _LOOPBACK:
        return False
    origin = headers.get("origin")
    if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
        return False
    return headers.get("sec-fetch-site", "none") not in {"cross-site", "same-site"} or _is_navigation(headers)


def _is_own_form(headers: Headers) -> bool:
    """True for a form that a page of this very address has sent: a browser always says its origin then."""
    kind = headers.get("content-type", "").partition(";")[0].strip()
    return (
        headers.get("origin") is not None
        and headers.get("sec-fetch-site", "same-origin") == "same-origin"
        and kind == "application/x-www-form-urlencoded"
    )


def _is_navigation(headers: Headers) -> bool:
    """True for a link that somebody followed to here. SameSite keeps the cookie from it, so it shows the refusal, or
    the key."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _bare(host: str) -> str:
    return host.removeprefix("::ffff:")


def _say(status: int, sentence: str) -> Response:
    return PlainTextResponse(sentence + "\n", status_code=status)
