"""The table of reported defects names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"((?:packages|tests)/[\w./-]+\.py)?(?:::(test_\w+))?")


def test_each_test_that_the_table_names_is_there() -> None:
    """`::test_name` alone is of the file before it in its row."""
    missing, count = [], 0
    for row in (ROOT / "tests" / "reported_defects.md").read_text(encoding="utf-8").splitlines():
        text = ""
        for named in NAMED.finditer(row):
            path, name = named.groups()
            if path:
                text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
                missing += [] if text else [path]
            if name:
                count += 1
                missing += [] if f"def {name}" in text else [f"{name} in {row[:40]!r}"]
    assert not missing
    assert count > 180
