"""Reads the answer out of what a model wrote.

"… so it is <answer>42</answer>"  ─►  42          "The sum:\n42"  ─►  42, its last line
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["read_answer"]

TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPENED: Final = "<answer>"


def read_answer(text: str) -> str:
    """The text in the last pair of `<answer>` tags, after the last tag that is not closed where there is no pair, else
    the last line that is not empty. Without white space around it; empty where there is nothing."""
    if tagged := TAGGED.findall(text):
        return str(tagged[-1]).strip()
    if OPENED in text:
        return text.rpartition(OPENED)[2].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
