"""Location of a run's store: a file in its folder, or a schema of a PostgreSQL database, which the folder names.

<run>/store.sqlite
<run>/run.json  {"store": "postgresql://me@host/name?options=-csearch_path%3Dlightningrl_mine_0a1b2c3d"}

The URL in `run.json` never holds a password.
"""

from __future__ import annotations

from pathlib import Path

from lightningrl.sanitize import parse_json

__all__ = ["find_store", "has_store"]


def find_store(folder: Path) -> str:
    """The URL of a run's store, by its folder."""
    return _named(folder) or f"sqlite:///{folder.resolve() / 'store.sqlite'}"


def has_store(folder: Path) -> bool:
    """True if the folder has or names a store."""
    return (folder / "store.sqlite").is_file() or _named(folder) is not None


def _named(folder: Path) -> str | None:
    """Read the URL that the folder names; None where its run.json names none, or is another program's."""
    try:
        origin = parse_json((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    store = origin.get("store") if isinstance(origin, dict) else None
    return store if isinstance(store, str) and store.startswith("postgresql") else None
