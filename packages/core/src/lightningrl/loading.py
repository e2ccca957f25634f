"""A user's own agent, reward, tasks or credit assigner: `"my_file.py:score"` → the callable, with no package around it.

"my_file.py:score"      a file, relative to the recipe's folder
"my_file:score"         the same; else an importable module
"package.module:score"  an importable module
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from lightningrl.errors import ConfigError, describe_raised

__all__ = [
    "absolute_reference",
    "describe",
    "is_reference",
    "load_callable",
    "refuse_in_import",
    "resolve",
    "run_recipe_file",
]

_importing: contextvars.ContextVar[str | None] = contextvars.ContextVar("lightningrl_importing", default=None)
"""The file or module that is being imported for something in it."""


class StartedByImport(ConfigError):
    """An import that would start a run, in which somebody would import it again."""


def refuse_in_import(call: str) -> None:
    """Raise ConfigError where a user's file makes `call` while it is imported for what it defines: the agent, in a
    worker."""
    source = _importing.get()
    # multiprocessing asks this itself
    if source is None and getattr(multiprocessing.current_process(), "_inheriting", False):
        source = str(getattr(sys.modules.get("__mp_main__"), "__file__", "the main script"))
    if source is not None:
        raise StartedByImport(
            f'{call} is called while {source!r} is imported; put the call under `if __name__ == "__main__":` there'
        )


def is_reference(text: str) -> bool:
    """True for the form `file_or_module:name`, which is no plugin's name."""
    return ":" in text


def absolute_reference(text: str, base_dir: Path) -> str:
    """The same reference for a process in any folder: a file by its whole path. Raises ConfigError where it is not
    there."""
    source, _, name = text.rpartition(":")
    path = _find_file(source, base_dir, text)
    return f"{path}:{name}" if path.is_file() else text


def load_callable(reference: str, base_dir: Path | str = ".") -> Callable[..., Any]:
    """Load the callable that `reference` names. A file is run once per process; its folder joins `sys.path`, as when
    Python runs a script, so it can import its neighbours.

    Raises ConfigError: no such file or module, import failed, no such attribute, not callable.
    """
    source, _, attribute = reference.rpartition(":")
    if not source or not attribute:
        raise ConfigError(f"{reference!r} names no callable; write 'file.py:name' or 'package.module:name'")
    module = _load_module(source, Path(base_dir), reference)
    value: Any = module
    for name in attribute.split("."):
        if name in ("<lambda>", "<locals>"):
            raise ConfigError(
                f"{reference!r}: a lambda, or a function within another one, is not found again by its name; give it "
                "anew (in Python by `settings`), or define it at the top of its file"
            )
        if not hasattr(value, name):
            offered = sorted(key for key, item in vars(module).items() if callable(item) and not key.startswith("_"))
            raise ConfigError(
                f"{reference!r}: {source!r} has no {name!r}; it has: {', '.join(offered[:12]) or 'no callables'}"
            )
        value = getattr(value, name)
    if not callable(value):
        raise ConfigError(f"{reference!r} is a {type(value).__name__}, not callable; name a function or a class")
    return value  # type: ignore[no-any-return]


def describe(value: Any) -> Any:
    """Name a Python object of a recipe as `file.py:name`, for the frozen copy; a table stays as it is."""
    if isinstance(value, str | dict):
        return value
    target = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    # each kernel writes a notebook's cells to files of its own
    has_file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return f"{(inspect.getsourcefile(target) if has_file else target.__module__) or '?'}:{target.__qualname__}"


def name_of_path(value: Any) -> Any:
    """A path's text; another value as it is."""
    return str(value) if isinstance(value, PurePath) else value


def resolve(reference: Any, folder: Path) -> Callable[..., Any]:
    """A callable from `"file.py:name"` or the object itself. Raises ConfigError."""
    if isinstance(reference, str):
        return load_callable(reference, folder)
    if not callable(reference):
        raise ConfigError(
            f"{reference!r} is a {type(reference).__name__}, not callable; give a function or 'file.py:name'"
        )
    return reference  # type: ignore[no-any-return]


def run_recipe_file(path: Path) -> ModuleType:
    """Run a Python recipe anew and return its module: it can import its neighbours, and other processes find what it
    defines. Raises ConfigError."""
    path = path.resolve()
    sys.modules.pop(_module_name(path), None)
    return _run_file(path, f"recipe {path.name}")


def _find_file(source: str, base_dir: Path, reference: str) -> Path:
    """The file of that name, also where it is not there and `source` may be a module."""
    path = (base_dir / (source if source.endswith(".py") else f"{source}.py")).resolve()
    if not path.is_file() and (source.endswith(".py") or "/" in source or "\\" in source):
        raise ConfigError(f"{reference!r}: no file {str(path)!r}; paths are relative to {str(base_dir.resolve())!r}")
    return path


def _load_module(source: str, base_dir: Path, reference: str) -> ModuleType:
    path = _find_file(source, base_dir, reference)
    if path.is_file():
        return _run_file(path, reference)
    if (base_dir / source.partition(".")[0]).is_dir():
        _add_folder(base_dir.resolve())
    try:
        with _importing_now(source):
            return importlib.import_module(source)
    except StartedByImport:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise _import_failed(reference, source, error) from error
        raise ConfigError(
            f"{reference!r}: no file {str(path)!r} and no module {source!r}; check the spelling or install it"
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(reference, source, error) from error


def _run_file(path: Path, reference: str) -> ModuleType:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    _add_folder(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{reference!r}: {str(path)!r} cannot be read as Python; name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing_now(str(path)):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, StartedByImport):
            raise
        raise _import_failed(reference, str(path), error) from error
    return module


@contextlib.contextmanager
def _importing_now(source: str) -> Iterator[None]:
    token = _importing.set(source)
    try:
        yield
    finally:
        _importing.reset(token)


def _add_folder(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module_name(path: Path) -> str:
    """The file's stem, so that neighbours that import it get the same module; a longer name where the stem is taken."""
    stem = path.stem
    taken = sys.modules.get(stem)
    if taken is not None and getattr(taken, "__file__", None) and Path(str(taken.__file__)).resolve() == path:
        return stem
    if taken is None and stem.isidentifier() and stem not in sys.stdlib_module_names:
        return stem
    return f"_lightningrl_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{stem}"


def _import_failed(reference: str, source: str, error: BaseException) -> ConfigError:
    remedy = "fix it, then run again"
    if isinstance(error, ImportError) and "relative import" in str(error):
        remedy = "name it as a module of its package, 'folder.file:name', or import without the dot"
    return ConfigError(f"{reference!r}: importing {source!r} raised {describe_raised(error)}; {remedy}")
