"""Rows of harnesses, what a recipe's `agent` table takes, and what a check's output says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.types import Task
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import agent_reference, load_agent, runs_in_process
from lightningrl_client.runtime.harnesses import box, guard
from lightningrl_client.runtime.harnesses.program import count_tests
from lightningrl_client.runtime.harnesses.rows import Places, read_table

RECIPE = """
agent = { harness = "pi", check = "pytest -q" }
tasks.train = "data.jsonl"
policy.model = "model"
[rewards.works]
use = "check"
"""


@pytest.mark.parametrize("name", read_table())
def test_a_row_says_how_it_is_started_installed_and_what_it_needs(name: str) -> None:
    row = read_table()[name]
    assert any("{input}" in word for word in row.command)
    assert all(re.fullmatch(r"@?[\w./-]+(\[\w+\])?((==|@)[\d.]+)?", package) for package in row.packages)
    assert re.search(r"(==|@)\d[\d.]*$", row.packages[0]), "the version that was tried"
    assert row.install.startswith(("npm install -g ", "uv tool install "))
    assert row.prompt > 0
    assert row.context >= max(8_192, 2 * row.prompt) and row.context.bit_count() == 1


def test_what_a_task_says_is_not_read_as_a_place_and_is_no_option() -> None:
    places = Places(input="--help {key}", base_url="http://x/v1", key="secret", model="m", home="/h", folder="/f")
    assert places.fill("{model}: {input}, {home}, {other}") == "m: --help {key}, /h, {other}"
    assert places.argument("{input}") == " --help {key}"
    assert "secret" not in repr(places)


def test_a_recipe_names_a_harness_and_its_copy_keeps_the_table(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml", {"agent.template": "."})
    table = {"harness": "pi", "check": "pytest -q", "template": "."}
    assert recipe.agent == table
    assert recipe.model_dump(mode="json")["agent"] == table
    assert agent_reference(recipe.agent).startswith('harness:{"harness": "pi"')
    assert not runs_in_process(recipe)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"check": "true"}, 'agent is a table without a harness; write agent = { harness = "pi" }'),
        ({"harness": "pie"}, "no harness named 'pie'; there are claude-code, codex, opencode, pi, "),
        ({"harness": "pi", "chek": "true"}, "unknown key 'agent.chek'; did you mean 'check'?"),
        ({"harness": {"command": "sh"}}, "agent.harness.command is 'sh'; write its words: command = ["),
        ({"harness": {"comand": ["sh"]}}, "unknown key 'agent.harness.comand'; did you mean 'command'?"),
        (
            {"harness": {"command": ["sh"], "files": {"a": 1}}},
            "agent.harness.files is {'a': 1}; write a table of texts",
        ),
        ({"harness": {"command": ["sh"]}, "disk_mb": 0}, "agent.disk_mb is 0; give a number above 0"),
        ({"harness": {"command": ["sh"]}, "network": "none"}, "agent.network is 'none'; write 'open' or 'gateway'"),
        ({"harness": {"command": ["sh"]}, "template": "none"}, "agent.template: no folder '"),
        ({"harness": {"command": ["sh"]}, "revision": "-none"}, "agent.revision: no git revision '-none' in '"),
        (
            {"harness": {"command": ["no-such-harness"], "npm": ["nsh@1.0"]}},
            "harness 'no-such-harness': no program 'no-such-harness'; install it: npm install -g nsh@1.0",
        ),
        (
            {"harness": {"command": ["no-such-harness"], "pip": ["nsh==1.0", "more"]}},
            "install it: uv tool install nsh==1.0 --with 'more'",
        ),
        ({"harness": {"command": ["no-such-harness"]}}, "install it, or give its path"),
    ],
)
def test_a_table_that_is_wrong_is_refused_in_a_sentence(tmp_path: Path, table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_agent(agent_reference(table), tmp_path)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("..F\n=== short summary ===\n1 failed, 2 passed in 0.02s", (2, 1)),
        ("===== 3 passed, 1 skipped, 2 warnings, 1 error in 0.1s =====", (3, 1)),
        ("no tests ran in 0.01s", None),
        ("Ran 5 tests in 0.001s\n\nFAILED (failures=1, errors=1)", (3, 2)),
        ("Ran 1 test in 0.000s\n\nOK", (1, 0)),
        ("Tests:       1 failed, 3 passed, 4 total\nTime: 1 s", (3, 1)),
        ("test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured", (4, 2)),
        ("--- PASS: TestA (0.00s)\n    --- PASS: TestA/b (0.00s)\n--- FAIL: TestB (0.00s)\nFAIL", (2, 1)),
        ("TAP version 13\nok 1 - a\nnot ok 2 - b\n1..2", (1, 1)),
        ("all is well", None),
    ],
)
def test_an_output_says_how_many_tests_passed(text: str, counts: tuple[int, int] | None) -> None:
    assert count_tests(text) == counts


def test_where_no_namespaces_are_to_be_had_a_box_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "box.py").write_text("import sys; sys.exit('Operation not permitted')")
    monkeypatch.setattr(box, "__file__", str(tmp_path / "box.py"))
    with pytest.raises(ConfigError, match=r"needs user namespaces, .* here: Operation not permitted; leave it out, or"):
        load_agent(agent_reference({"harness": {"command": ["sh"]}, "network": "gateway"}), tmp_path)


async def test_outside_of_a_rollout_a_harness_runs_as_well(tmp_path: Path) -> None:
    loaded = load_agent(agent_reference({"harness": {"command": ["sh", "-c", "pwd > here; echo $HOME"]}}), tmp_path)
    output = await loaded.function("x", Task(id="x", input="x"))
    assert not Path(output["text"]).exists() and "+++ b/here" in output["diff"]


def test_the_guard_clears_a_folder_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    (folder / "7" / "closed").mkdir(parents=True)
    (folder / "7" / "closed" / "file").write_text("x")
    (folder / "7" / "closed").chmod(0o500)
    lives_there = subprocess.Popen(["sleep", "100000"], cwd=folder / "7", start_new_session=True)
    is_at_home = subprocess.Popen(["sleep", "100000"], env={"HOME": f"{folder}/7"}, start_new_session=True)
    watch = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, str(folder)], stdin=subprocess.PIPE, cwd="/")
    assert watch.stdin is not None
    watch.stdin.close()
    assert (lives_there.wait(60), is_at_home.wait(60), watch.wait(60)) == (-9, -9, 0)
    assert not folder.exists()
