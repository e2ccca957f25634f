"""LightningRL: train the language model inside any agent with reinforcement learning; the agent's code does not change.

The names in `__init__.pyi` are all that a recipe, a reward, a credit assigner, a plugin or a hand-written agent needs.
They are imported when first used. What else may be imported, and from where, is in docs/plugins.md.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from lightningrl.lazy import read_homes

_HOMES = read_homes(__file__)
_EXTRAS: Final = {"client": "worker", "server": "server", "training": "torch"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightningrl' has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(home.partition(".")[0].removeprefix("lightningrl_"))
        if extra is None or error.name != home.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"lightningrl.{name} is not installed; pip install 'lightningrl[{extra}]'", name=error.name
        ) from None
    return getattr(module, name) if name in vars(module) else importlib.import_module(f"{home}.{name}")


def __dir__() -> list[str]:
    return __all__
