"""Every part of a recipe on the pages of credit is one that builds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl_training.build import build_credit

DOCS = Path(__file__).parents[3] / "docs"
PARTS = [
    (page.relative_to(DOCS).as_posix(), title, body)
    for page in sorted([*(DOCS / "explanation" / "credit").glob("*.md"), *(DOCS / "reference").glob("*rewards.md")])
    for title, body in re.findall(
        r"^```toml title=(\S+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    if "[credit]" in body
]
INLINE = re.findall(
    r"`options = (\{.*?\})`", (DOCS / "explanation" / "credit" / "turns.md").read_text(encoding="utf-8")
)


def build(folder: Path, part: str) -> None:
    """The page's own files lie in `folder`."""
    (folder / "page_tasks.py").write_text(
        "def tasks(): return [{'id': 't', 'input': 1}]\ndef right(task, output, trajectory): return 1.0\n"
    )
    whole = {
        "agent": "page_tasks.py:tasks",
        "tasks": {"train": "page_tasks.py:tasks"},
        "policy": {"model": "org/model"},
        "rewards": {"right": {"use": "page_tasks.py:right"}},
        "intermediate_rewards": {"tools": {"use": "tool_status"}},
        "judge": {"base_url": "http://127.0.0.1:1", "model": "judge"} if "judge" in part else None,
        "folder": folder,
        **tomllib.loads(part),
    }
    build_credit(
        Recipe.model_validate({key: value for key, value in whole.items() if value is not None}), load_plugins()
    )


@pytest.mark.parametrize(("page", "title", "part"), PARTS, ids=[f"{page}:{title}" for page, title, _ in PARTS])
def test_a_pages_part_of_a_recipe_builds(page: str, title: str, part: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, body in re.findall(r"^```python title=(\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(body, encoding="utf-8")
    build(tmp_path, part)


@pytest.mark.parametrize("options", INLINE)
def test_the_papers_methods_are_options_of_turns(options: str, tmp_path: Path) -> None:
    build(tmp_path, f'[credit]\nuse = "turns"\noptions = {options}\n')


def test_there_are_such_parts() -> None:
    assert {"mixed.toml", "by_turns.toml", "by_states.toml"} <= {title for _, title, _ in PARTS}
    assert len(INLINE) == 3
