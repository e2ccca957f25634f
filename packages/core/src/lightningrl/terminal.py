"""The terminal, which may not know every character that we or an agent write."""

from __future__ import annotations

import io
import sys

__all__ = ["accept_any_text"]


def accept_any_text() -> None:
    """Have standard output and error write `?` for a character that their encoding has not, instead of raising. Where they say what it was
    (`\\\\u2192`), as standard error does, they go on so."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
