"""Starts a package of one's own: copies the tested templates that `lightningrl new` and `lightningrl init` hand out."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Final

from lightningrl.errors import ConfigError

__all__ = ["new_agent", "new_package"]

TEMPLATES: Final = Path(__file__).parent / "templates"


def new_package(kind: str, name: str, folder: Path | str | None = None) -> Path:
    """Write a plugin package called `lightningrl-NAME` and return its folder (default: `./lightningrl-NAME`).

    `kind`: a folder of `templates`. It installs, runs, and passes its conformance suite as it is.
    Raises ConfigError: bad name, folder in use.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        article = "an" if kind == "adapter" else "a"
        raise ConfigError(
            f"{name!r} cannot be {article} {kind}'s name; use lower-case letters, digits and dashes, like 'my-own'"
        )
    distribution = module.replace("_", "-")
    words = {
        "NAME_MODULE": module,
        "NAME_UPPER": module.upper(),
        "NAME_DIST": distribution,
        "NAME_CLASS": "".join(part.title() for part in module.split("_")),
    }
    target = Path(folder) if folder is not None else Path(f"lightningrl-{distribution}")
    return _copy(TEMPLATES / kind, target, words)


def new_agent(folder: Path | str) -> Path:
    """Write an agent with its tasks, reward, recipe, and the script that makes its starting policy. Raises ConfigError:
    folder in use."""
    return _copy(TEMPLATES / "agent", Path(folder), {})


def _copy(template: Path, target: Path, words: dict[str, str]) -> Path:
    files = {
        target / fill(str(source.relative_to(template)).removesuffix(".template"), words): fill(
            source.read_text(encoding="utf-8"), words
        )
        for source in sorted(template.rglob("*.template"))
    }
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"folder {str(target)!r} is in use; name another one")
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"folder {str(target)!r} cannot be written: {error.strerror}; name another one") from error
    return target


def fill(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
