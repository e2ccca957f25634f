"""What a server process is told at its start; passed as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightningrl.types import SamplingSettings

__all__ = ["PolicySettings", "ServerSettings"]


class PolicySettings(BaseModel):
    """How one policy's messages become tokens, and how it is sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | Path
    """Folder or hub name of the tokenizer."""
    renderer: Any = "auto"
    """Name of the `renderers` library, or "auto"."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    """Training settings; a rollout's own go before them."""
    trainable: bool = True


class ServerSettings(BaseModel):
    """All of a server process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_url: str
    """`sqlite:///path`"""
    run_key: str = Field(min_length=8, repr=False)
    """Opens the control API and the engine link."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 = any free one."""
    policies: Mapping[str, PolicySettings] = Field(default_factory=dict[str, PolicySettings])
    default_policy: str | None = None
    """Serves model names that are no policy's; None = the only policy."""
    engine_wait_s: float = Field(default=600.0, gt=0)
    """How long one call waits while its policy is held or has no engine."""
    max_body_bytes: int = Field(default=32 * 2**20, gt=0)
    longest_wait_s: float = Field(default=60.0, gt=0)
    """Of a long poll."""
    log_level: str = "warning"
