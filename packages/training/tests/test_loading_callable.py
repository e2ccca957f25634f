"""A user's own callable by `file.py:name`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightningrl.errors import ConfigError
from lightningrl.loading import is_reference, load_callable


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_function_of_a_file_with_or_without_suffix(tmp_path: Path) -> None:
    write(tmp_path, "lrl_mine.py", "def score(): return 5\nclass Best:\n    @staticmethod\n    def of(): return 6\n")
    assert load_callable("lrl_mine.py:score", tmp_path)() == 5
    assert load_callable("lrl_mine:score", tmp_path)() == 5
    assert load_callable("lrl_mine.py:Best.of", tmp_path)() == 6
    assert load_callable(f"{tmp_path}/lrl_mine.py:score", "/")() == 5


def test_file_runs_once_and_is_the_module_its_neighbours_import(tmp_path: Path) -> None:
    write(tmp_path, "lrl_agent.py", "calls = []\ndef run(): calls.append(1); return len(calls)\n")
    write(tmp_path, "lrl_reward.py", "import lrl_agent\ndef score(): return len(lrl_agent.calls)\n")
    load_callable("lrl_agent.py:run", tmp_path)()
    assert load_callable("lrl_reward.py:score", tmp_path)() == 1
    assert load_callable("lrl_agent.py:run", tmp_path)() == 2


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, "lrl_same.py", f"def name(): return {folder!r}\n")
    assert [load_callable(f"{folder}/lrl_same.py:name", tmp_path)() for folder in ("one", "two")] == ["one", "two"]


def test_file_named_like_a_standard_module_hides_nothing(tmp_path: Path) -> None:
    import types

    write(tmp_path, "types.py", "def score(): return 1\n")
    assert load_callable("types.py:score", tmp_path)() == 1
    assert sys.modules["types"] is types


def test_module_and_package_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, "lrl_package/__init__.py", "")
    write(tmp_path, "lrl_package/inner.py", "from . import other\ndef score(): return other.VALUE\n")
    write(tmp_path, "lrl_package/other.py", "VALUE = 3\n")
    assert load_callable("lrl_package.inner:score", tmp_path)() == 3
    assert load_callable("json:dumps", tmp_path)([1]) == "[1]"


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("score", "'score' names no callable; write 'file.py:name'"),
        ("lrl_mine.py:", "names no callable"),
        (":score", "names no callable"),
        ("missing.py:score", r"no file '.*missing\.py'; paths are relative to"),
        ("folder/missing:score", r"no file '.*missing\.py'"),
        ("lrl_nowhere:score", r"no file '.*lrl_nowhere\.py' and no module 'lrl_nowhere'"),
        ("lrl_mine.py:scor", "'lrl_mine.py' has no 'scor'; it has: score"),
        (
            "lrl_mine.py:<lambda>",
            r"a lambda, or a function within another one, .* give it anew \(in Python by `settings`\)",
        ),
        ("lrl_mine.py:score.<locals>.inner", "a lambda, or a function within another one"),
        ("lrl_mine.py:VALUE", "is a int, not callable"),
        (
            "lrl_raises.py:score",
            r"importing '.*lrl_raises\.py' raised ZeroDivisionError: division by zero \(lrl_raises\.py, line \d+\); fix it",
        ),
        ("lrl_exits.py:score", "raised SystemExit: 2"),
        ("lrl_syntax.py:score", "raised SyntaxError"),
        ("lrl_needs.py:score", "raised ModuleNotFoundError: No module named 'lrl_absent'"),
        ("lrl_parts/inner.py:score", r"parent package \(inner.py, line 1\); name it as a module .* 'folder.file:name'"),
        ("lrl_dotted.py:score", "or import without the dot"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, reference: str, sentence: str) -> None:
    write(tmp_path, "lrl_mine.py", "VALUE = 3\ndef score(): return 5\n")
    write(tmp_path, "lrl_raises.py", "1 / 0\n")
    write(tmp_path, "lrl_exits.py", "raise SystemExit(2)\n")
    write(tmp_path, "lrl_syntax.py", "def score(:\n")
    write(tmp_path, "lrl_needs.py", "import lrl_absent\n")
    write(tmp_path, "lrl_dotted.py", "from . import lrl_mine\n")
    write(tmp_path, "lrl_parts/inner.py", "from .tools import VALUE\n")
    with pytest.raises(ConfigError, match=sentence):
        load_callable(reference, tmp_path)


def test_file_that_failed_can_be_loaded_once_it_is_fixed(tmp_path: Path) -> None:
    write(tmp_path, "lrl_fixed.py", "raise ValueError\n")
    with pytest.raises(ConfigError):
        load_callable("lrl_fixed.py:score", tmp_path)
    write(tmp_path, "lrl_fixed.py", "def score(): return 'a much longer text than before'\n")
    assert load_callable("lrl_fixed.py:score", tmp_path)() == "a much longer text than before"


def test_references_are_told_from_plugin_names() -> None:
    assert is_reference("my_file.py:score")
    assert not is_reference("grpo")


CALLS = {
    "train": "lightningrl.train('recipe.toml')",
    "resumed": "lightningrl.train(run='runs/one', resume=True)",
    "train_async": "asyncio.run(lightningrl.train_async('recipe.toml'))",
    "evaluate": "lightningrl.evaluate('runs/one')",
    "doctor": "asyncio.run(doctor(lightningrl.Recipe.model_construct()))",
    "problems": "list(lightningrl.problems('recipe.toml'))",
    "beside": "run_sync(lightningrl.train_async('recipe.toml'))",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reference", ["lrl_script.py:answer", "lrl_module.inner:answer", "lrl_neighbour.py:answer"])
def test_a_run_that_an_import_would_start_is_one_sentence_about_the_main_guard(
    tmp_path: Path, call: str, reference: str
) -> None:
    imports = "import asyncio\nimport lightningrl\nfrom lightningrl_training.run import doctor\nfrom lightningrl_training.run_sync import run_sync\n"
    text = f"{imports}def answer(question): return '1'\n{CALLS[call]}\n"
    for name in ("lrl_script.py", "lrl_module/inner.py"):
        write(tmp_path, name, text)
    write(tmp_path, "lrl_neighbour.py", "from lrl_script import answer\n")
    with pytest.raises(
        ConfigError, match=r'is imported; put the call under `if __name__ == "__main__":` there$'
    ) as refused:
        load_callable(reference, tmp_path)
    assert "\n" not in str(refused.value)


def test_what_is_imported_may_start_a_run_when_it_is_called(tmp_path: Path) -> None:
    write(
        tmp_path,
        "lrl_caller.py",
        "import lightningrl\ndef start(): return list(lightningrl.problems('nowhere.toml'))\n",
    )
    assert "nowhere.toml" in load_callable("lrl_caller.py:start", tmp_path)()[0]


def test_a_process_of_multiprocessing_that_imports_the_main_script_starts_no_run(tmp_path: Path) -> None:
    text = "import multiprocessing\nimport lightningrl\nif __name__ == '__main__':\n"
    text += "    process = multiprocessing.get_context('spawn').Process(target=print)\n    process.start()\n    process.join()\n"
    text += "else:\n    list(lightningrl.problems('nowhere.toml'))\n"
    write(tmp_path, "script.py", text)
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (
        "script.py' is imported; put the call under `if __name__" in ended.stderr
        or "the main script' is imported" in ended.stderr
    )
