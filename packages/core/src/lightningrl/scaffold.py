"""Starts a new adapter: copies the tested template that `lightningrl new adapter NAME` hands out."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Final

from lightningrl.errors import ConfigError

__all__ = ["new_adapter"]

TEMPLATE: Final = Path(__file__).parent / "templates" / "adapter"


def new_adapter(name: str, folder: Path | str | None = None) -> Path:
    """Write an adapter package called `lightningrl-NAME` and return its folder (default: `lightningrl-NAME` below the current one).

    It installs, runs, and passes the conformance suite as it is, on a toy framework. Raises ConfigError: bad name, folder in use.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise ConfigError(f"{name!r} cannot be an adapter's name; use lower-case letters, digits and dashes, like 'my-framework'")
    distribution = module.replace("_", "-")
    target = Path(folder) if folder is not None else Path(f"lightningrl-{distribution}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"folder {str(target)!r} is in use; name another one")
    words = {
        "NAME_MODULE": module,
        "NAME_DIST": distribution,
        "NAME_CLASS": "".join(part.title() for part in module.split("_")) + "Adapter",
    }
    for source in sorted(TEMPLATE.rglob("*.template")):
        file = target / fill(str(source.relative_to(TEMPLATE)).removesuffix(".template"), words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fill(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    return target


def fill(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
