"""Looking at a run without touching it: its store and its tokenizers, read; nothing is written, no lock is taken.

    open_run(folder)              ─► StoredRun.trace(id) ─► Trace  (lightningrl.look.trace)
    ServerClient (over HTTP)      ─►          .trace(id) ─► Trace: what was said in which tokens, what each call earned

The command line prints traces; a notebook and a viewer show the same. The names below need `lightningrl[server]`; they are imported when
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightningrl.look.reader import open_run, read_group
    from lightningrl.look.trace import whole_row

__all__ = ["open_run", "read_group", "whole_row"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lightningrl.look' has no attribute {name!r}")
    home = "trace" if name == "whole_row" else "reader"
    return getattr(importlib.import_module(f"lightningrl.look.{home}"), name)
