"""Removal of a run, for good: what the run made goes, and what else lies in its folder stays.

a run of ours, and no link? ─► does nobody hold its lock? ─► schema, files by their names ─► run.json, .lock, folder
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lightningrl.errors import RunFolderError
from lightningrl.files import locked
from lightningrl_server.store.location import find_store
from lightningrl_viewer.belongings import remove_made
from lightningrl_viewer.reading.origin import is_own
from lightningrl_viewer.reading.runs import is_run

__all__ = ["remove_run"]

_LOCK_S: Final = 0.5
"""Seconds to wait for the lock: pages that ask whether the run is live hold it for a moment."""
_LAST: Final = ("run.json", ".lock")
"""Files by which a folder is known as a run's: they go when nothing else of it is left."""


def remove_run(folder: Path) -> list[str]:
    """Remove a run, also from its database; return the names of what else lies in its folder, and stays. Raises
    RunFolderError where it is no run of ours, or runs, and StoreError where its database is away."""
    if folder.is_symlink() or not is_run(folder) or not is_own(folder):
        raise RunFolderError(f"no run of ours in {str(folder)!r}, so nothing is deleted; name the folder of a run")
    try:
        with locked(folder / ".lock", wait_s=_LOCK_S):
            if not (store := find_store(folder)).startswith("sqlite"):
                from lightningrl_server.store.postgresql import drop_schema

                drop_schema(store, folder)
            remove_made(folder)
            left = sorted(path.name for path in folder.iterdir() if path.name not in _LAST)
            for name in _LAST:
                (folder / name).unlink(missing_ok=True)
        if not left:
            folder.rmdir()
    except BlockingIOError:
        raise RunFolderError(f"run {str(folder)!r} is training, so it is not deleted; stop it first (Ctrl-C)") from None
    except (OSError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else "folders are nested too deeply in it"
        raise RunFolderError(
            f"run {str(folder)!r} cannot be deleted: {problem}; make its folder writable, then delete it again"
        ) from error
    return left
