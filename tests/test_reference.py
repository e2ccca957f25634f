"""docs/reference.md says what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lightningrl.config import LoopConfig, Recipe, RuntimeConfig
from lightningrl.plugins import HookSpecs

ROOT = Path(__file__).resolve().parents[1]


def made() -> str:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.reference())


def test_the_reference_is_current() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == made(), "write it anew: python scripts/make_reference.py"


def test_every_key_and_hook_is_in_it() -> None:
    page = made()
    keys = [
        *LoopConfig.model_fields,
        *RuntimeConfig.model_fields,
        *(key for key in Recipe.model_fields if key != "folder"),
        "learning_rate",
    ]
    hooks = [name for name in vars(HookSpecs) if name.startswith("lightningrl_")]
    assert [name for name in keys if f"| `{name}` |" not in page] == []
    assert [name for name in hooks if f"| `{name}(" not in page] == []
