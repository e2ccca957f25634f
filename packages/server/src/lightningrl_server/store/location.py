"""Location of a run's store: a file in its folder, or a schema of a PostgreSQL database, which the folder names.

<run>/store.sqlite
<run>/run.json  {"store": "postgresql://me@host/name?options=-csearch_path%3Dlightningrl_mine_0a1b2c3d"}

The URL in `run.json` never holds a password. A folder may be somebody else's, and a password goes to whoever its URL
names: only a database that a recipe, an option or the environment named is connected to. Those are remembered.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from lightningrl.errors import StoreError
from lightningrl.sanitize import parse_json

__all__ = ["check_named", "find_store", "has_store", "name_database", "named_store"]

_NAMED: Final = "LIGHTNINGRL_DATABASES"
"""Variable with databases that may be connected to, with blanks between them."""


def find_store(folder: Path) -> str:
    """The URL of a run's store, by its folder. Raises StoreError for a database that the folder alone names."""
    store = named_store(folder)
    if store.startswith("postgresql"):
        check_named(store)
    return store


def named_store(folder: Path) -> str:
    """The URL that a run's folder has or names, which is not to be connected to."""
    return _named(folder) or f"sqlite:///{folder.resolve() / 'store.sqlite'}"


def has_store(folder: Path) -> bool:
    """True if the folder has or names a store."""
    return (folder / "store.sqlite").is_file() or _named(folder) is not None


def name_database(url: str) -> None:
    """Remember a database that a recipe or an option names: runs that lie there are this user's own."""
    database = _database(url)
    if database in _known():
        return
    try:
        _memory().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _memory().open("a", encoding="utf-8") as file:
            file.write(f"{database}\n")
    except (OSError, RuntimeError):  # no home: for this process and those that it starts
        os.environ[_NAMED] = f"{os.environ.get(_NAMED, '')} {database}".strip()


def check_named(url: str) -> None:
    """Raise StoreError for a database that no recipe, option or variable has named."""
    try:
        parsed = make_url(url)
        database = _database(url)
    except (ArgumentError, ValueError):
        raise StoreError("the run's run.json names a database in a form that cannot be read; restore it") from None
    if database not in _known() and not _is_of_environment(parsed):
        raise StoreError(
            f"the run's folder says that its rollouts lie in {database!r}, a database that no recipe has named on this "
            f"machine; if you trust it with your password, set {_NAMED} to this address, and run the command again"
        )


def _database(url: str) -> str:
    return make_url(url).set(drivername="postgresql").difference_update_query(["options"]).render_as_string()


def _memory() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state, "lightningrl", "databases")


def _known() -> set[str]:
    try:
        remembered = _memory().read_text(encoding="utf-8").splitlines()
    except (OSError, RuntimeError, ValueError):
        remembered = []
    named = os.environ.get(_NAMED, "").split()
    return {*remembered, *(_database(url) for url in named if url.startswith("postgresql"))}


def _is_of_environment(url: URL) -> bool:
    """True for the server at PGHOST and PGPORT, which libpq's own programs connect to."""
    host, port = os.environ.get("PGHOST"), os.environ.get("PGPORT") or "5432"
    return bool(host) and url.host == host and str(url.port or 5432) == port and set(url.query) <= {"options"}


def _named(folder: Path) -> str | None:
    """Read the URL that the folder names; None where its run.json names none, or is another program's."""
    try:
        origin = parse_json((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    store = origin.get("store") if isinstance(origin, dict) else None
    return store if isinstance(store, str) and store.startswith("postgresql") else None
