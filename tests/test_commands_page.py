"""docs/reference/commands.md says what the command line parses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_commands_is_current_and_has_every_option() -> None:
    spec = importlib.util.spec_from_file_location("make_commands_page", ROOT / "scripts" / "make_commands_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert page == module.page(), "write it anew: python scripts/make_commands_page.py"
    assert "- `--resume`: " in page and "## `lightningrl rollouts`" in page
