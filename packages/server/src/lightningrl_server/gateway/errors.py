"""Refusals of the gateway: a sentence, an HTTP status and a code; each dialect writes it in its own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightningrl.errors import LightningError

__all__ = ["CONTEXT_CODE", "Refusal"]

CONTEXT_CODE: Final = "context_length_exceeded"
"""Of a prompt beyond the context, as OpenAI's SDKs know it."""
_LONGEST = 4000
"""Characters of a sentence."""


class Refusal(LightningError):
    """A call that is not answered with a completion."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if len(message) > _LONGEST:  # it quotes what was sent
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.details = details
        """What a dialect's SDK reads beside the sentence."""
