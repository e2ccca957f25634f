"""The recipe: what it sets that is no default, and, where asked, every key; its value, who reads it.

show=all
"""

from __future__ import annotations

import json
from itertools import groupby

from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.recipe import list_recipe_keys
from lightningrl_viewer.page import Budget, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE"]

PAGE_BYTES = 80_000
_MOST = 1_000
"""Bytes of a value that are shown."""


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    origin = RunOrigin.read(viewed.folder)
    keys = list_recipe_keys(origin.recipe, settings=origin.settings, values=origin.values)
    changed = request.query.get("show") != "all"
    shown = [one for one in keys if not changed or one.origin != "default"]
    budget = Budget(PAGE_BYTES)
    rows = [(one, budget.truncate("", json.dumps(one.value, ensure_ascii=False, default=str), _MOST)) for one in shown]
    tables = [
        (name, list(part))
        for name, part in groupby(rows, key=lambda row: row[0].key.rpartition(".")[0].partition(".")[0])
    ]
    return PageView(
        "recipe.html",
        title="Recipe",
        source=origin.source,
        tables=tables,
        changed=changed,
        total=len(keys),
        count=len(rows),
    )


PAGE = Page("recipe", show, name="Recipe", key="e")
