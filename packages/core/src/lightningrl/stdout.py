"""Standard output of a process that its parent reads: for answers alone, whatever a user's code prints."""

from __future__ import annotations

import os
from typing import BinaryIO

__all__ = ["take_stdout"]


def take_stdout() -> BinaryIO:
    """Standard output, kept for answers: what anybody prints from now on, in C or in a child too, goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
