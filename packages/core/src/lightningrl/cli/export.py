"""`lightningrl export`: a run's newest weights as a transformers folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl.training.parts import Parts
from lightningrl.training.policies import load_backend
from lightningrl.training.run_folder import RunFolder, newest_run

__all__ = ["export_command", "open_to_readers"]


def export_command(target: Path, *, run: Path | None, runs: Path, policy: str | None = None) -> None:
    folder, recipe, _ = RunFolder.resume(run or newest_run(runs), {})
    try:
        saved = folder.latest()
        if saved is None:
            raise RunFolderError(f"run {str(folder.path)!r} has no checkpoint yet; train it first")
        if target.exists() and any(target.iterdir()):
            raise RunFolderError(f"folder {str(target)!r} is not empty; give another")
        name = policy or recipe.policy.name
        trained = [known for known, config in recipe.all_policies.items() if config.trainable]
        if name not in trained:
            raise ConfigError(f"no policy {name!r} was trained in run {str(folder.path)!r}; choose one with --policy: {', '.join(trained)}")
        backend = Parts.build(recipe, load_plugins(), will_run=False).backends[name]()
        try:
            load_backend(backend, saved[0], name)
            backend.export(target)
            open_to_readers(target)
        finally:
            backend.close()
    finally:
        folder.close()
    Console().print(f"wrote {target}: weights after step {saved[1].step}", highlight=False)


def open_to_readers(folder: Path) -> None:
    """The same rights for every file: some libraries write weights for their owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
