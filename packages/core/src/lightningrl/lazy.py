"""Packages whose public names stand in their `__init__.pyi`, each imported when it is first used."""

import importlib
from collections.abc import Callable

__all__ = ["lazy_names", "read_homes"]

_PUNCTUATION = str.maketrans("(),", "   ")


def read_homes(init: str) -> dict[str, str]:
    """Public names of a package with the module that defines each, as the stub beside its `__init__.py` lists them."""
    # no `ast`, `pathlib` or `re` here, and no `typing` above: they take longer than the rest of `import lightningrl`
    with open(f"{init.removesuffix('.py')}.pyi", encoding="utf-8") as stub:  # noqa: PTH123
        text = stub.read().partition("\n__all__")[0]
    imports = [line.partition(" import ") for line in text.split("\nfrom ")[1:]]
    # "(\n  Task as Task,\n  ToolCall as ToolCall,\n)" → every third word
    return {name: home for home, _, names in imports for name in names.translate(_PUNCTUATION).split()[::3]}


def lazy_names(package: str, init: str) -> tuple[Callable[[str], object], list[str]]:
    """`__getattr__` and `__all__` of a package, from its stub."""
    homes = read_homes(init)

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, sorted(homes)
