"""Where a run's store is: a file in its folder, or a schema of its own in a PostgreSQL database, which the folder names.

<run>/store.sqlite
<run>/run.json  {"store": "postgresql://me@host/name?options=-csearch_path%3Dlightningrl_mine_0a1b2c3d"}      never with a password
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["find_store", "has_store"]


def find_store(folder: Path) -> str:
    """The URL of a run's store, by its folder."""
    run = folder / "run.json"
    store: str | None = json.loads(run.read_text(encoding="utf-8")).get("store") if run.is_file() else None
    return store or f"sqlite:///{folder.resolve() / 'store.sqlite'}"


def has_store(folder: Path) -> bool:
    """Whether the folder has or names one."""
    return (folder / "store.sqlite").is_file() or not find_store(folder).startswith("sqlite")
