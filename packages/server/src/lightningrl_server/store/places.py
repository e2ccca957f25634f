"""Where a run's store is: a file in its folder, or a schema of its own in a PostgreSQL database, which the folder names.

<run>/store.sqlite
<run>/run.json  {"store": "postgresql://me@host/name?options=-csearch_path%3Dlightningrl_mine_0a1b2c3d"}      never with a password
"""

from __future__ import annotations

from pathlib import Path

from lightningrl.sanitize import parse_json

__all__ = ["find_store", "has_store"]


def find_store(folder: Path) -> str:
    """The URL of a run's store, by its folder."""
    return _named(folder) or f"sqlite:///{folder.resolve() / 'store.sqlite'}"


def has_store(folder: Path) -> bool:
    """Whether the folder has or names one."""
    return (folder / "store.sqlite").is_file() or _named(folder) is not None


def _named(folder: Path) -> str | None:
    """Another program may have a run.json, too."""
    try:
        origin = parse_json((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    store = origin.get("store") if isinstance(origin, dict) else None
    return store if isinstance(store, str) and store.startswith("postgresql") else None
