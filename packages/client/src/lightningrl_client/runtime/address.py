"""Under which address the workers of other machines find a server that listens on this one."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit

__all__ = ["is_loopback", "machine_address", "reachable_url"]

_ELSEWHERE = ("192.0.2.1", 9)
"""Documentation range (RFC 5737). Connecting a datagram socket sends nothing; it only chooses the interface."""


def machine_address() -> str:
    """The address that this machine uses towards others; 127.0.0.1 where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def reachable_url(server_url: str) -> str:
    """The url for workers: where the server listens on every address (0.0.0.0), this machine's; else as it is."""
    parts = urlsplit(server_url)
    if parts.hostname not in {"0.0.0.0", "::"}:  # noqa: S104  compared with, not bound to
        return server_url
    return urlunsplit(parts._replace(netloc=f"{machine_address()}:{parts.port}"))


def is_loopback(server_url: str) -> bool:
    """True if only this machine reaches the url."""
    host = urlsplit(server_url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
