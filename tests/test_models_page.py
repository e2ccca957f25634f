"""docs/reference/models.md says what its script finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_models_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_models_page", ROOT / "scripts" / "make_models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert page == module.page(), "write it anew: python scripts/make_models_page.py"
