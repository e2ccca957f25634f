"""A clock that jumps: Debian's libfaketime, where this machine has it."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["NO_CLOCK_JUMPED", "find_faketime"]

NO_CLOCK_JUMPED = "no libfaketime on this machine; `apt-get install libfaketime`"


def find_faketime() -> Path:
    """The library to be preloaded. Skips the test where there is none."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip(NO_CLOCK_JUMPED)
    return library
