"""pytest for the conformance suites, a sentence where it is missing; and factories of a tested package's plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from lightningrl.plugins import load_plugins

__all__ = ["call_factories", "pytest", "pytest_asyncio"]

try:
    import pytest
    import pytest_asyncio
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the conformance suites need {error.name}; install it with `pip install 'lightningrl[testing]'`",
        name=error.name,
    ) from error


def call_factories(hook: str, part: object, /, **offered: Any) -> None:
    """Call the factory of each installed plugin of the hook that comes from the part's package. As a recipe without
    options does; those that need more than is `offered` are left out. Raises PluginError where one raises."""
    package = _package(part if inspect.isroutine(part) else type(part))
    for plugin in load_plugins().records(hook).values():
        if _package(plugin.factory) != package or package == "lightningrl":
            continue
        parameters = inspect.signature(plugin.factory).parameters
        options = {name: value for name, value in offered.items() if name in parameters}
        own = (parameter for name, parameter in parameters.items() if name not in options)
        if not any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in own):
            plugin.build(**options)


def _package(part: Callable[..., Any]) -> str:
    while isinstance(part, partial):
        part = part.func
    return str(getattr(part, "__module__", "")).partition(".")[0]
