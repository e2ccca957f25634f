"""How big a test is: telling in seconds by default, at the size that it claims with `pytest --long` (`make
test-long`)."""

from __future__ import annotations

import os
from typing import Final, TypeVar

__all__ = ["LONG", "PATIENCE_S", "sized"]

T = TypeVar("T")
LONG: Final = "LIGHTNINGRL_LONG_TESTS"
"""Set by `--long`, for the test processes of pytest-xdist too."""
PATIENCE_S: Final = 900.0
"""After this a wait has failed, also on a machine that is slow and busy: what ends a wait is what it waits for, never a
clock."""


def sized(telling: T, full: T) -> T:
    """The size for this run."""
    return full if LONG in os.environ else telling
