"""The run folder: one directory that holds everything a run is and was.

runs/<name>-<time>/
  recipe.json   the frozen recipe           run.json       places of recipe and models, settings: the mark of a run
  tasks.npz     digests of its tasks        store.sqlite   rollouts, calls, rewards (or in PostgreSQL)
  logs/         server and workers          metrics.jsonl, curve.png, checkpoints/
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from lightningrl.errors import RunFolderError, StoreError
from lightningrl.files import lock, release, sync, write_durably
from lightningrl.recipe import Recipe
from lightningrl.sanitize import printable
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_runs.belongings import (
    FILES,
    list_checkpoints,
    list_made,
    remove_checkpoint,
    remove_made,
)
from lightningrl_runs.origin import RunOrigin, flatten, is_own, place_models, read_run_file
from lightningrl_server.store.location import check_named, find_store, has_store, name_database, named_store
from lightningrl_training.checkpoints import Checkpoint, LoopState, best_checkpoint, checkpoints
from lightningrl_training.tasks import (
    TASKS_FILE,
    TaskSets,
    decode_digests,
    digest_tasks,
    encode_digests,
    explain_other_tasks,
)

__all__ = [
    "RunFolder",
    "default_run",
    "explain_name",
    "take_lock",
]

FREE_ON_RESUME = re.compile(
    r"(loop\.(steps|minutes|checkpoint_every|keep_checkpoints|keep_rollouts|patience|stop_at)|runtime|store_url"
    r"|logger(s|_options)|validation\.every|outcomes\.max_failed_rewards|learner\.lora$"
    r"|rewards\.[^.]+\.(timeout_s|retries|concurrency)"
    r"|judge\.(api_key_env|concurrency|retries|timeout_s|max_calls|max_tokens))"
)
"""Settings that may change when a run goes on; all others make it another run."""
_LONGEST_NAME = 200
"""Bytes of a run's name: its folders have the time behind it."""
_LOCK_S = 0.5
"""Seconds to wait for the lock: pages that ask whether the run is live hold it for a moment."""


class RunFolder:
    """An open run folder, locked against other processes until `close`."""

    def __init__(self, path: Path, lock: IO[str], *, is_new: bool = False) -> None:
        self.path = path
        self._lock = lock
        self._is_new = is_new

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Recipe,
        source: str | None,
        settings: Mapping[str, Any],
        *,
        models: Mapping[str, str],
        overwrite: bool = False,
    ) -> RunFolder:
        """Make a run, readable by its owner alone, in a folder that is absent, empty, or holds a run that never began,
        or any run with `overwrite`. What no run made stays as it is. Raises RunFolderError."""
        _check_free(path, overwrite=overwrite)
        folder, is_new = None, not path.exists()
        if recipe.store_url is not None:
            name_database(recipe.store_url)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = cls(path, take_lock(path), is_new=is_new)
            if is_own(path):
                folder._empty()
            places = {
                "source": source,
                "folder": str(recipe.folder.resolve()),
                "run": str(path.resolve()),
                **place_models(recipe, models),
            }
            origin = {**places, "settings": dict(settings)}
            folder._tell(origin)  # the first of all files: from now on the folder is known as ours
            if recipe.store_url is not None:
                from lightningrl_server.store.postgresql import create_schema

                folder._tell({**origin, "store": create_schema(recipe.store_url, path)})
            for name in ("checkpoints", "logs"):
                (path / name).mkdir(mode=0o700, exist_ok=True)
            for file in (folder.metrics, *([] if recipe.store_url else [path / "store.sqlite"])):
                file.touch(mode=0o600)
            write_durably(path / "recipe.json", recipe.frozen_text())
        except (OSError, StoreError) as error:
            if folder is not None:
                if not (path / "recipe.json").exists():
                    folder.discard()
                folder.close()
            if isinstance(error, StoreError):
                raise
            raise RunFolderError(
                f"run folder {str(path)!r} cannot be written: {error.strerror}; free space or give another --run"
            ) from error
        return folder

    @classmethod
    def resume(
        cls, path: Path, settings: Mapping[str, Any], source: Path | Recipe | None = None, *, tunes: bool = False
    ) -> tuple[RunFolder, Recipe]:
        """An earlier run with its recipe, read again from its source or from the one given. Raises RunFolderError when
        it has changed."""
        origin = RunOrigin.read(path)
        if not is_own(path):
            raise RunFolderError(
                f"no run in {str(path)!r} that has a run.json of ours; `lightningrl train RECIPE` starts one"
            )
        if (path / "tune").is_dir() != tunes:
            other = "train" if tunes else "tune"
            raise RunFolderError(
                f"run {str(path)!r} is of `lightningrl {other}`; go on with it by "
                f"`lightningrl {other} --resume --run {shlex.quote(str(path))}`"
            )
        given, source = source, source or origin.source
        if source is None:
            raise RunFolderError(
                f"run {str(path)!r} was started by Python code; go on with `lightningrl.train(recipe, "
                f"run={str(path)!r}, resume=True)`"
            )
        if isinstance(source, Path) and not source.exists():
            raise RunFolderError(
                f"recipe {str(source)!r} of run {str(path)!r} is gone; say where it is: "
                f"`lightningrl train RECIPE --resume --run {shlex.quote(str(path))}`"
            )
        merged = {**origin.settings, **settings}
        folder = cls(path, take_lock(path))
        try:
            recipe = load_recipe(source, merged) if isinstance(source, Path) else with_settings(source, merged)
            _check_same(origin.recipe, recipe, path)
            is_given = "store_url" in settings or (given is not None and "store_url" not in origin.settings)
            if recipe.store_url is not None and is_given:
                name_database(recipe.store_url)
            folder._find_database(recipe.store_url)
        except BaseException:
            folder.close()
            raise
        return folder, recipe

    def keep_settings(self, recipe: Recipe, settings: Mapping[str, Any]) -> None:
        """Keep what the run goes on with beside what it was started with, so that it goes on so the next time, too."""
        if settings:
            saved = read_run_file(self.path)
            origin = {**saved, "settings": {**saved.get("settings", {}), **settings}}
            write_durably(self.path / "recipe.json", recipe.frozen_text())
            self._tell(origin)

    def place_policy(self, name: str, model: Path) -> None:
        """Keep where the run's start of a policy lies, once it is another than the recipe's."""
        saved = read_run_file(self.path)
        files = {policy: origin for policy, origin in saved.get("files", {}).items() if policy != name}
        self._tell({**saved, "models": {**saved["models"], name: str(model)}, "files": files})

    def match_tasks(self, tasks: TaskSets) -> None:
        """Keep which tasks the run trains on, and is validated with. Raises RunFolderError where it started with
        others: a place in the stream of tasks would be another task's, trained on twice or never."""
        path, now = self.path / TASKS_FILE, digest_tasks(tasks)
        if path.is_file() and (difference := explain_other_tasks(decode_digests(path), now)) is not None:
            raise RunFolderError(
                f"run {str(self.path)!r} started with other tasks: {difference}; give it those, start a new run, or go "
                f"on with these all the same: remove {str(path)!r}"
            )
        if not path.is_file():
            write_durably(path, encode_digests(now))

    @contextlib.contextmanager
    def making(self, *names: str) -> Iterator[None]:
        """Keep in mind what the body makes in these folders, whose files we do not name: the run's, it goes with it."""
        before = {path for name in names for path in (self.path / name).glob("*")}
        try:
            yield
        finally:
            made = sorted(
                str(path.relative_to(self.path)) for name in names for path in {*(self.path / name).glob("*")} - before
            )
            if made:
                saved = read_run_file(self.path)
                self._tell({**saved, "made": [*saved.get("made", ()), *made]})

    @property
    def store_url(self) -> str:
        return find_store(self.path)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoints(self) -> list[Checkpoint]:
        return checkpoints(self.path)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        return next(reversed(self.checkpoints()), None)

    def new_checkpoint(self, step: int) -> Path:
        """A scratch folder for a checkpoint; becomes one by `commit_checkpoint`."""
        scratch = self.path / "checkpoints" / f".step-{step:06d}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def commit_checkpoint(self, scratch: Path, state: LoopState, keep: int) -> None:
        """Make a scratch folder the newest checkpoint, in one rename; older ones beyond `keep` go, but for the best.
        Which that is, the checkpoints say: there is no second write that a kill could come before."""
        write_durably(scratch / FILES, list_made(scratch))
        write_durably(scratch / "loop.json", json.dumps(asdict(state)) + "\n")
        final = scratch.with_name(scratch.name.removeprefix("."))
        remove_checkpoint(final)
        if final.exists():
            raise RunFolderError(
                f"{str(final)!r} is none of the run's checkpoints; move it away, then run again with --resume"
            )
        scratch.rename(final)
        sync(final.parent)
        saved, best = self.checkpoints(), best_checkpoint(self.path)
        for old in saved[:-keep]:
            if best is None or old.state.step != best.state.step:
                remove_checkpoint(old.folder.parent)

    def write_view_key(self, key: str) -> None:
        """For Prometheus (`credentials_file`), and who lost the link: it opens pages and metrics of this start."""
        write_durably(self.path / "view.key", key)

    def has_rollouts(self) -> bool:
        """True where anything was asked of the agent: its answers are kept, also before the first checkpoint."""
        return _has_rollouts(self.path)

    def discard(self) -> None:
        """Remove a run that never began, with the folder that was made for it. Where anything else lies in it, it stays
        known as ours."""
        self._empty()
        if {file.name for file in self.path.iterdir()} <= {".lock", "run.json"}:
            for name in (".lock", "run.json"):
                (self.path / name).unlink(missing_ok=True)
            if self._is_new:
                self.path.rmdir()

    def close(self) -> None:
        release(self._lock)

    def _find_database(self, database: str | None) -> None:
        """Follow the run's schema to a moved or renamed database."""
        if database is not None:
            from lightningrl_server.store.postgresql import move_schema

            check_named(database)
            moved = move_schema(named_store(self.path), database, self.path)
            saved = read_run_file(self.path)
            if saved["store"] != moved:
                self._tell({**saved, "store": moved})

    def _empty(self) -> None:
        """Remove what the run made, but the mark that the folder is ours. Nothing goes without a database."""
        if not self.store_url.startswith("sqlite"):
            from lightningrl_server.store.postgresql import drop_schema

            drop_schema(self.store_url, self.path)
        remove_made(self.path)
        for checkpoint in list_checkpoints(self.path):  # behind a link to storage that nodes share
            remove_checkpoint(checkpoint)

    def _tell(self, origin: Mapping[str, Any]) -> None:
        write_durably(self.path / "run.json", json.dumps(origin, indent=2, default=str) + "\n")


def explain_name(name: str) -> str | None:
    """Why a recipe's name cannot be that of a folder; None = it can."""
    if (
        not name.strip()
        or name.startswith((".", "-"))
        or any(mark in name for mark in "/\\\n\t")
        or printable(name) != name
    ):
        return f"name: {name[:100]!r} is no name for a run's folder; begin with a letter or a digit, and use no slashes"
    if len(name.encode()) > _LONGEST_NAME:
        return f"name: {name[:40]!r} and what follows is too long for a run's folder; use at most {_LONGEST_NAME} bytes"
    return None


def default_run(root: Path, name: str) -> Path:
    """A fresh folder name for a run that starts now."""
    return root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_free(path: Path, *, overwrite: bool) -> None:
    """Raise RunFolderError where a folder has anything but a run of ours, or one that began and is not to be written
    over. A link to an empty place for checkpoints, on storage that nodes share, may be there already."""
    try:
        names = sorted(file.name for file in path.iterdir())
        link = path / "checkpoints"
        if names == [link.name] and link.is_symlink() and link.is_dir() and not any(link.iterdir()):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"run folder {str(path)!r} cannot be read: {error.strerror}; give another --run"
        ) from error
    if names and not is_own(path):
        raise RunFolderError(
            f"folder {str(path)!r} holds {names[0]!r} and no run; a run is made in a new or an empty folder: give "
            "another --run"
        )
    if names and not overwrite and (checkpoints(path) or _has_rollouts(path) or (path / "warm_start").is_dir()):
        raise RunFolderError(
            f"run folder {str(path)!r} already holds a run; go on with it by --resume, write over it with --overwrite, "
            "or give another --run"
        )


def _has_rollouts(path: Path) -> bool:
    """True where the store of a run has rollouts. A store that cannot be read may have."""
    from lightningrl_server.store.sql import has_rollouts

    try:
        return has_store(path) and has_rollouts(find_store(path))
    except StoreError:
        return True


def take_lock(path: Path, *, kind: str = "run folder", option: str = "--run") -> IO[str]:
    """Lock a folder for this process, until the file is closed. Raises RunFolderError where another has it."""
    try:
        file = os.fdopen(
            os.open(path / ".lock", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "a+", encoding="utf-8"
        )
    except OSError as error:
        sentence = (
            f"{kind} {str(path)!r} cannot be locked: its '.lock' cannot be opened ({error.strerror}); remove it, "
            f"or give another {option}"
        )
        raise RunFolderError(sentence) from error
    try:
        lock(file, wait_s=_LOCK_S)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise RunFolderError(
            f"{kind} {str(path)!r} is in use by process {holder}; wait for it, stop it, or give another {option}"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _check_same(old: Recipe, new: Recipe, path: Path) -> None:
    before, after = (flatten(json.loads(recipe.frozen_text())) for recipe in (old, new))
    has_moved = (old.store_url is None) != (new.store_url is None)  # from one kind of store to another
    changed = [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and (not FREE_ON_RESUME.match(key) or (key == "store_url" and has_moved))
    ]
    if changed:
        key = changed[0]
        was, now = (repr(values[key]) if key in values else "not set" for values in (before, after))
        setting = shlex.quote(f"{key}={json.dumps(before.get(key), ensure_ascii=False)}")
        how = "leave it out" if before.get(key) is None else f"restore it (`--set {setting}`)"
        raise RunFolderError(
            f"recipe of run {str(path)!r} has changed since it started: {key!r} was {was}, is {now}; {how}, or start a "
            "new run"
        )
