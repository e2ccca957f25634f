"""Methods of classes and functions of modules, wrapped until they are restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

__all__ = ["Patches", "Wrapper"]

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""`wrapt`'s: (wrapped, instance, args, kwargs)."""


class Patches:
    """Everything that is wrapped at present."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], None]] = []
        self._is_active = True

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Wrap a method of a class, or a function of a module, that `owner` itself defines; what it inherits is wrapped there."""
        original = vars(owner).get(name)
        if original is None:
            return
        setattr(owner, name, wrapt.FunctionWrapper(original, wrapper))
        self._restores.append(lambda: setattr(owner, name, original))

    def when_imported(self, module: str, patch: Callable[[Any], None]) -> None:
        """Call `patch(module)` now if it is imported, else as soon as it is, unless all has been restored by then."""

        def patch_if_active(imported: Any) -> None:
            if self._is_active:
                patch(imported)

        wrapt.register_post_import_hook(patch_if_active, module)

    def restore(self) -> None:
        """Unwrap everything, for good."""
        self._is_active = False
        while self._restores:
            self._restores.pop()()
