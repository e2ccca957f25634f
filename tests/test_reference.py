"""docs/reference/recipe.md says what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pydantic

from lightningrl import recipe, recipe_tables
from lightningrl.plugins import HookSpecs
from lightningrl.recipe_tables import Table, UpstreamModelConfig

ROOT = Path(__file__).resolve().parents[1]


def made() -> str:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.reference())


def test_the_reference_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert page == made(), "write it anew: python scripts/make_reference.py"


def test_every_table_key_and_hook_is_in_it() -> None:
    page = made()
    public = [getattr(module, name) for module in (recipe, recipe_tables) for name in module.__all__]
    tables = [
        one
        for one in public
        if isinstance(one, type) and issubclass(one, pydantic.BaseModel) and one not in (Table, UpstreamModelConfig)
    ]
    said = {" ".join((one.__doc__ or "").split()) for one in tables}
    assert [sentence for sentence in said if f"\n\n{sentence}\n\n- `" not in page] == []
    keys = [key for one in tables for key in one.model_fields if key != "folder"]
    ours = [
        "learning_rate",
        "target_modules",
        "joint",
        "tensor_parallel",
        "exclude",
    ]  # of other tables
    assert [name for name in (*keys, *ours) if not re.search(rf"^- `{name}[ `]", page, re.MULTILINE)] == []
    assert "`sync_every = 1`" in page and 'One of `"fsdp2"`, `"fsdp"`, `"megatron"`.' in page
    hooks = [name for name in vars(HookSpecs) if name.startswith("lightningrl_")]
    assert [name for name in hooks if f"- `{name}(" not in page] == []
