"""A noun has one definition: what a new field of a Transition costs, and how often the fields of a record are
listed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightningrl.records import Lease, Score
from lightningrl.types import Trajectory, Transition

SOURCES = Path(__file__).parents[1] / "packages"
COPIED = ("core/src/lightningrl", "server/src/lightningrl_server", "testing/src/lightningrl_testing")

EDITS = (
    (
        "lightningrl/types.py",
        "    trainable: bool = True\n",
        "    trainable: bool = True\n    taken_over: str | None = None\n",
    ),
    (
        "lightningrl_server/store/tables.py",
        '    Column("history_key", CleanText),\n',
        '    Column("history_key", CleanText),\n    Column("taken_over", CleanText),\n',
    ),
)

GOES_ALL_THE_WAY = """
import asyncio, sys
from lightningrl import wire
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import leased, make_call, make_spec
from lightningrl.types import Outcome

async def main(url):
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    await store.append_call(make_call(await leased(store), "c0", [1], [2], taken_over="earlier"))
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
    (call,) = await store.calls("a", 1)
    (sent,) = wire.decode_trajectories(wire.encode_trajectories(await store.trajectories(["a"])))
    await store.close()
    print(call.transition.taken_over, sent.transitions[0].taken_over)

asyncio.run(main(sys.argv[1]))
"""


def test_a_new_field_of_a_transition_is_two_edits(tmp_path: Path) -> None:
    for package in COPIED:
        shutil.copytree(SOURCES / package, tmp_path / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in EDITS:
        path = tmp_path / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", GOES_ALL_THE_WAY, f"sqlite:///{tmp_path}/store.db"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "earlier earlier\n", ran.stderr


@pytest.mark.parametrize(
    ("record", "places"),
    [
        (  # its definition, who makes it, who makes one up
            Transition,
            {"lightningrl/types.py", "lightningrl_server/gateway/attempt_memory.py", "lightningrl_testing/groups.py"},
        ),
        (Trajectory, {"lightningrl/types.py"}),
        (Lease, {"lightningrl/records.py", "lightningrl_server/store/queue.py"}),
        (Score, {"lightningrl/records.py", "lightningrl_server/store/ledger.py"}),
    ],
)
def test_the_fields_of_a_record_are_listed_where_it_is_defined_and_made(record: type, places: set[str]) -> None:
    fields = set(record.__slots__)  # type: ignore[attr-defined]
    found = {
        path.relative_to(SOURCES).as_posix().partition("/src/")[2]
        for path in SOURCES.glob("*/src/**/*.py")
        for names in _lists_of_names(ast.parse(path.read_text(encoding="utf-8")))
        if len(fields & names) > 0.7 * len(fields)
    }
    assert found == places


def _lists_of_names(tree: ast.AST) -> Iterator[set[str]]:
    """The fields that a class, the keywords that a call, and the keys that a dict names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
        elif isinstance(node, ast.Call):
            yield {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Dict):
            yield {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
