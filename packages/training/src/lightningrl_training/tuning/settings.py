"""The table `[tune]` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from lightningrl.errors import ConfigError

__all__ = ["Method", "TuneSettings"]

Method = Literal["sft", "dpo", "kto"]


class TuneSettings(pydantic.BaseModel):
    """Settings of `lightningrl tune`, with the defaults of TRL's trainers where it has such."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    data: Path
    """A .jsonl file, or a folder with `sft.jsonl`, `dpo.jsonl`, `kto.jsonl`, or with such files in `train/`."""
    method: Method = "sft"
    validation: float | Path | None = Field(default=None)
    """Share of the rows that is held out, or a file or folder of rows. None = the folder's `validation/`, if any."""
    epochs: int = Field(default=3, ge=1)
    """Times that each row is learned from."""
    batch: int = Field(default=16, ge=1)
    """Rows in an update."""
    learning_rate: float | None = Field(default=None, gt=0)
    """AdamW's. None = 2e-5 for sft and 1e-6 for dpo and kto; ten times that for adapters."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates over which the learning rate rises; then it falls to 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on matrices alone."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the starting policy, of dpo and kto."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the good answers of kto."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of its bad ones."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row, prompt and answer together; longer ones are left out. None = the policy's context."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Updates."""
    seed: int = 0
    """Seed of the order of rows."""

    @classmethod
    def read(cls, table: Mapping[str, Any], folder: Path) -> TuneSettings:
        """Read the table of a recipe in `folder`. Raises ConfigError."""
        if "data" not in table:
            raise ConfigError("tune.data is missing; name a folder of rows, or a .jsonl file: --data ROWS")
        try:
            settings = cls.model_validate(dict(table))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"][:1]))
            raise ConfigError(f"tune.{key}: {first['msg']}; it takes: {', '.join(sorted(cls.model_fields))}") from None
        if isinstance(settings.validation, float) and not 0 < settings.validation < 1:
            raise ConfigError(f"tune.validation is {settings.validation:g}; give a share between 0 and 1, or a file")
        placed = {"data": _place(settings.data, folder, "data")}
        if isinstance(settings.validation, Path):
            placed["validation"] = _place(settings.validation, folder, "validation")
        return settings.model_copy(update=placed)

    def rate(self, *, adapters: bool) -> float:
        """`learning_rate`, or what it is where nobody said (TRL's SFTConfig, DPOConfig and KTOConfig)."""
        usual = 2e-5 if self.method == "sft" else 1e-6
        return self.learning_rate if self.learning_rate is not None else usual * (10 if adapters else 1)


def _place(path: Path, folder: Path, key: str) -> Path:
    for place in (folder / path, path):
        if place.exists():
            return place.resolve()
    raise ConfigError(f"tune.{key}: no file or folder {str(path)!r} beside the recipe or here; name one that is there")
