"""The APIs that agents speak: all that is special to one stands in its `Dialect`, and all dialects in `DIALECTS`.

Declarations only, so that a worker reads them without the gateway's code: the server alone loads `format`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from lightningrl.plugins import PluginManager

__all__ = ["DIALECTS", "Dialect", "build_dialects", "call_of", "find_endpoint", "key_headers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One API. Endpoints are paths below a base, `chat/completions`; one with `{model}` in it names the model there."""

    name: str
    format: str
    """`"package.module:Class"` of its `lightningrl_server.gateway.dialects.format.DialectFormat`."""
    endpoints: tuple[str, ...]
    """A policy answers them, or the upstream."""
    counting: tuple[str, ...] = ()
    """They say how long a call would be; nothing is sampled. The format is a `CountingFormat`."""
    forwarded: tuple[str, ...] = ()
    """The upstream alone answers them."""
    others: tuple[str, ...] = ()
    """They are kept from the provider during a rollout, too."""
    bases: tuple[str, ...] = ("/v1",)
    """Paths that clients put between an attempt's address and an endpoint; redirected calls get the first."""
    hosts: tuple[str, ...] = ()
    """Where the API's own clients call, redirected during a rollout; with a port if it is not the scheme's."""
    base_variables: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Environment variables that clients take their base URL from, and what follows the attempt's address in each."""
    key_variables: tuple[str, ...] = ()
    key_header: str = "authorization"
    """Carries the key; in `authorization` it follows `Bearer`, which every dialect may use."""
    sent_headers: tuple[str, ...] = ()
    """Headers of its own that the upstream is sent."""
    request_id_header: str = "x-request-id"
    """Header of an answer in which its clients read the call's id."""
    answer_prefix: str = ""
    """Prefix of an answer's id, before the transition's."""
    stream_type: str = "text/event-stream; charset=utf-8"

    def __post_init__(self) -> None:
        if not self.endpoints or not self.bases:
            raise ConfigError(f"dialect {self.name!r} has no endpoints or no bases; give at least one of each")
        if ":" not in self.format:
            raise ConfigError(f"dialect {self.name!r}: format {self.format!r} is no 'package.module:Class'")
        for base in self.bases:
            if base and (not base.startswith("/") or base.endswith("/")):
                raise ConfigError(f"dialect {self.name!r}: base {base!r} has to begin with '/' and end without one")


DIALECTS: Final = (
    Dialect(
        name="chat",
        format="lightningrl_server.gateway.dialects.chat:ChatFormat",
        endpoints=("chat/completions",),
        forwarded=("embeddings",),
        others=("completions", "models"),
        hosts=("api.openai.com",),
        base_variables={
            "OPENAI_BASE_URL": "/v1",
            "OPENAI_API_BASE": "/v1",
        },  # LangChain reads the latter before the former
        key_variables=("OPENAI_API_KEY",),
        sent_headers=("openai-beta",),
        answer_prefix="chatcmpl-",
    ),
    Dialect(
        name="responses",
        format="lightningrl_server.gateway.dialects.responses:ResponsesFormat",
        endpoints=("responses",),
        hosts=("api.openai.com",),
        sent_headers=("openai-beta",),
        answer_prefix="resp_",
    ),
    Dialect(
        name="messages",
        format="lightningrl_server.gateway.dialects.messages:MessagesFormat",
        endpoints=("messages",),
        counting=("messages/count_tokens",),
        bases=("/v1", ""),  # Vercel's client adds no /v1
        hosts=("api.anthropic.com",),
        base_variables={"ANTHROPIC_BASE_URL": ""},  # Anthropic's client adds it
        key_variables=("ANTHROPIC_API_KEY",),
        key_header="x-api-key",
        sent_headers=("anthropic-version", "anthropic-beta"),
        request_id_header="request-id",
        answer_prefix="msg_",
    ),
)
"""Dialects of our own. A refusal at a path that tells of no dialect is written in the first one's format."""


def build_dialects(plugins: PluginManager) -> tuple[Dialect, ...]:
    """Core's and the installed ones. Raises ConfigError where two answer one path."""
    dialects = (*DIALECTS, *(plugin.build() for plugin in plugins.dialects.values()))
    owners: dict[str, str] = {}
    for dialect in dialects:
        endpoints = (*dialect.endpoints, *dialect.counting, *dialect.forwarded)
        for path in (f"{base}/{endpoint}" for base in dialect.bases for endpoint in endpoints):
            if path in owners:
                raise ConfigError(
                    f"the dialects {owners[path]!r} and {dialect.name!r} both answer {path!r}; uninstall one"
                )
            owners[path] = dialect.name
    return dialects


def key_headers(dialects: Sequence[Dialect]) -> tuple[str, ...]:
    """Headers that carry a key beside `authorization`."""
    return tuple(dict.fromkeys(dialect.key_header for dialect in dialects if dialect.key_header != "authorization"))


def call_of(answer_id: str, dialects: Sequence[Dialect]) -> str:
    """The transition's id in an answer's."""
    for dialect in dialects:
        answer_id = answer_id.removeprefix(dialect.answer_prefix)
    return answer_id


def find_endpoint(dialects: tuple[Dialect, ...], path: str) -> tuple[Dialect, str] | None:
    """Whose endpoint a URL's path ends in, and the path of that endpoint below an attempt.

    `/proxy/openai/chat/completions` is chat's `/v1/chat/completions`, `/v1/messages/batches` something of messages;
    None = nobody's.
    """
    for pattern, dialect in _patterns(dialects):
        match = pattern.search(path)
        if match is not None:
            return dialect, dialect.bases[0] + match.group()
    return None


@cache
def _patterns(dialects: tuple[Dialect, ...]) -> tuple[tuple[re.Pattern[str], Dialect], ...]:
    """Whole endpoints of all dialects, then what may lie below one: `models/gemini-pro:generateContent` is no
    `models/…` of chat's."""
    patterns = []
    for below in ("", "/[^?]*"):
        for dialect in dialects:
            endpoints = (*dialect.endpoints, *dialect.counting, *dialect.forwarded, *dialect.others)
            patterns.append((re.compile(f"/(?:{'|'.join(map(_regex, endpoints))}){below}$"), dialect))
    return tuple(patterns)


def _regex(endpoint: str) -> str:
    return re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(endpoint))
