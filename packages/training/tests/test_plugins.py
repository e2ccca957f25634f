"""Plugins: found by entry point or handed over, and named when something is wrong with them."""

import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import LightningError, PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_testing import _pytest
from lightningrl_testing.credit_conformance import CreditConformance
from lightningrl_training.build import Parts, build_assigner


def module_with(**hooks: Callable[..., object]) -> types.ModuleType:
    module = types.ModuleType("a_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def record(name: str) -> Plugin:
    return Plugin(name=name, summary="a test", factory=dict)


def test_records_carry_the_distribution_that_brought_them() -> None:
    manager = PluginManager()
    manager.register(
        module_with(lightningrl_adapters=lambda: [record("haystack")]), distribution="lightningrl-haystack 1.0"
    )
    assert manager.adapters["haystack"].distribution == "lightningrl-haystack 1.0"


def test_an_unknown_name_lists_what_is_installed() -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_credit_assigners=lambda: [record("lightning"), record("grpo")]))
    with pytest.raises(
        PluginError, match="no credit assigner named 'grop'; installed: grpo, lightning; did you mean 'grpo'"
    ):
        manager.find("lightningrl_credit_assigners", "grop")


def test_a_misspelt_hook_is_named_with_its_remedy() -> None:
    with pytest.raises(
        PluginError,
        match=r"plugin from mine 0\.1: no hook named 'lightningrl_adaptors'; did you mean 'lightningrl_adapters'",
    ):
        PluginManager().register(module_with(lightningrl_adaptors=lambda: iter(())), distribution="mine 0.1")


def test_a_hook_with_an_argument_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PluginError, match=r"plugin from mine 0\.1 cannot be registered"):
        PluginManager().register(
            module_with(lightningrl_rollout_finished=lambda rollout: None), distribution="mine 0.1"
        )


def test_two_plugins_of_one_name_are_refused() -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_trainers=lambda: [record("torch")]), distribution="one 1")
    manager.register(module_with(lightningrl_trainers=lambda: [record("torch")]), distribution="two 2")
    with pytest.raises(PluginError, match="two trainer backends are named 'torch': from one 1 and two 2"):
        _ = manager.trainers


def test_a_hook_that_yields_something_else_is_refused() -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_adapters=lambda: ["haystack"]), distribution="mine 0.1")
    with pytest.raises(PluginError, match="yielded str, not Plugin"):
        _ = manager.adapters


@pytest.mark.parametrize(
    ("raises", "sentence"),
    [
        (
            lambda: int("gold"),
            r"lightningrl_adapters raised ValueError: .*gold. \(test_plugins.py, line \d+\); fix or uninstall it",
        ),
        (lambda: None, "lightningrl_adapters raised TypeError: .*not iterable"),
    ],
)
def test_a_hook_that_raises_is_named_with_its_distribution(raises: Callable[[], object], sentence: str) -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_adapters=raises), distribution="mine 0.1")
    with pytest.raises(PluginError, match=f"plugin from mine 0.1: {sentence}"):
        _ = manager.adapters


def test_what_is_installed_here_is_found() -> None:
    manager = load_plugins()
    assert "grpo" in manager.credit_assigners
    assert "torch" in manager.trainers
    assert "langchain" in manager.adapters


def test_langgraphs_adapter_is_told_by_its_name() -> None:
    with pytest.raises(PluginError, match=r"no adapter named 'langgraph'; .*did you mean 'langchain'"):
        load_plugins().find("lightningrl_adapters", "langgraph")
    with pytest.raises(PluginError, match=r"it comes with: pip install 'lightningrl\[langchain\]'"):
        PluginManager().find("lightningrl_adapters", "langgraph")


def test_a_broken_entry_point_is_named_with_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    broken = importlib.metadata.EntryPoint(name="bad", value="no_such_module_here", group="lightningrl")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    with pytest.raises(PluginError, match="plugin 'bad' of no_such_module_here cannot be loaded: ModuleNotFoundError"):
        load_plugins()


@dataclass(frozen=True)
class Halves(CreditAssigner):
    share: float = 0.5

    requires = frozenset({"group"})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        raise NotImplementedError


def renamed(*, scale: float = 0.5) -> object:
    return Halves(scale=scale)  # type: ignore[call-arg]


def unfinished() -> object:
    raise SystemExit("not written yet")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            renamed,
            r"TypeError: Halves.__init__\(\) got an unexpected keyword argument 'scale' \(test_plugins.py, line \d+\)",
        ),
        (unfinished, "SystemExit: not written yet"),
        (lambda: importlib.import_module("no_such_package"), "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
@pytest.mark.parametrize(
    ("hook", "setting"),
    [
        ("lightningrl_credit_assigners", {"credit": {"use": "halves"}}),
        ("lightningrl_reward_functions", {"rewards": {"right": {"use": "halves"}}}),
        ("lightningrl_intermediate_rewards", {"intermediate_rewards": {"right": {"use": "halves"}}}),
        ("lightningrl_credit_needs", {}),
        ("lightningrl_dialects", {}),
    ],
)
def test_a_factory_that_raises_is_named_with_its_plugin_distribution_and_remedy(
    hook: str, setting: dict[str, Any], factory: Callable[[], object], said: str, tmp_path: Path
) -> None:
    manager = load_plugins()
    record = Plugin(name="halves", summary="a test", factory=factory)
    manager.register(module_with(**{hook: lambda: [record]}), distribution="lightningrl-halves 0.3")
    (tmp_path / "own.py").write_text(
        "def answer(text): ...\ndef right(task, output, trajectory): ...\n", encoding="utf-8"
    )
    recipe = Recipe.model_validate(
        {
            "agent": "own.py:answer",
            "tasks": {"train": "own.py:answer"},
            "policy": {"model": "org/model"},
            "rewards": {"right": {"use": "own.py:right"}},
            "folder": tmp_path,
            **setting,
        }
    )
    with pytest.raises(LightningError) as caught:
        Parts.build(recipe, manager)
    sentences = str(caught.value).splitlines()
    assert any(
        re.match(
            rf"plugin 'halves' from lightningrl-halves 0.3: its factory raised {said}.*; mend its options or the plugin, or take",
            sentence,
        )
        for sentence in sentences
    ), sentences


def test_a_class_of_ones_own_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "own_credit.py").write_text(
        "class Mine:\n    def __init__(self):\n        self.gone\n", encoding="utf-8"
    )
    with pytest.raises(
        LightningError,
        match=r"'own_credit.py:Mine' raised AttributeError: .* \(own_credit.py, line 3\) when it was made",
    ):
        build_assigner(load_plugins(), "own_credit.py:Mine", {}, tmp_path)


def test_a_factory_that_is_no_function_is_refused() -> None:
    manager = PluginManager()
    manager.register(
        module_with(lightningrl_credit_assigners=lambda: [Plugin(name="halves", summary="", factory=Halves())]),  # type: ignore[arg-type]
        distribution="mine 0.1",
    )
    with pytest.raises(PluginError, match="yielded 'halves' with a factory that is no function"):
        _ = manager.credit_assigners


def test_conformance_suites_call_the_factories_of_the_package_that_they_test(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = load_plugins()
    record = Plugin(name="halves", summary="a test", factory=renamed)
    manager.register(module_with(lightningrl_credit_assigners=lambda: [record]), distribution="lightningrl-halves 0.3")
    monkeypatch.setattr(_pytest, "load_plugins", lambda: manager)

    class Suite(CreditConformance):
        def make_assigner(self) -> CreditAssigner:
            return Halves()

    with pytest.raises(
        PluginError, match=r"plugin 'halves' from lightningrl-halves 0\.3: its factory raised TypeError"
    ):
        Suite().test_installed_factories_make_it()


PLUGIN = """
from lightningrl import Plugin, hookimpl

def build_halves(*, scale=0.5):
    return object(scale=scale)

def build_flow():
    raise RuntimeError("flow is not there")

@hookimpl
def lightningrl_credit_assigners():
    yield Plugin(name="halves", summary="halves", factory=build_halves)

@hookimpl
def lightningrl_adapters():
    yield Plugin(name="flow", summary="flow", factory=build_flow)
"""


def test_an_installed_plugin_whose_factories_raise_is_a_problem_of_the_recipe_before_anything_heavy_starts(
    tmp_path: Path,
) -> None:
    installed = tmp_path / "installed"
    (installed / "bad_plugins-0.3.dist-info").mkdir(parents=True)
    (installed / "bad_plugins-0.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bad-plugins\nVersion: 0.3\n"
    )
    (installed / "bad_plugins-0.3.dist-info" / "entry_points.txt").write_text("[lightningrl]\nbad = bad_plugins\n")
    (installed / "bad_plugins.py").write_text(PLUGIN)
    (tmp_path / "own.py").write_text(
        "def answer(text): ...\ndef right(task, output, trajectory): ...\ndef tasks(): return [{'id': 'a', 'input': 1}]\n"
    )
    (tmp_path / "recipe.toml").write_text(
        'agent = "own.py:answer"\nadapters = ["flow"]\ntasks.train = "own.py:tasks"\npolicy.model = "org/model"\n'
        'rewards.right.use = "own.py:right"\ncredit.use = "halves"\n'
    )
    program = "import sys, lightningrl; print(*lightningrl.problems(sys.argv[1]), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "recipe.toml")],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    for name, words in (
        ("halves", r"TypeError: object\(\) takes no arguments"),
        ("flow", "RuntimeError: flow is not there"),
    ):
        sentence = rf"^plugin '{name}' from bad-plugins 0\.3: its factory raised {words}.*; mend its options"
        assert re.search(sentence, done.stdout, re.MULTILINE), done
    assert "Traceback" not in done.stdout + done.stderr
