"""Plugins: found by entry point or handed over, and named when something is wrong with them."""

import types
from collections.abc import Callable

import pytest

from lightningrl.errors import PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins


def module_with(**hooks: Callable[..., object]) -> types.ModuleType:
    module = types.ModuleType("a_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def record(name: str) -> Plugin:
    return Plugin(name=name, summary="a test", factory=dict)


def test_records_carry_the_distribution_that_brought_them() -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_adapters=lambda: [record("haystack")]), distribution="lightningrl-haystack 1.0")
    assert manager.adapters["haystack"].distribution == "lightningrl-haystack 1.0"


def test_an_unknown_name_lists_what_is_installed() -> None:
    manager = PluginManager()
    manager.register(module_with(lightningrl_credit_assigners=lambda: [record("lightning"), record("grpo")]))
    with pytest.raises(PluginError, match="no credit assigner named 'grop'; installed: grpo, lightning; did you mean 'grpo'"):
        manager.find("lightningrl_credit_assigners", "grop")


def test_a_misspelt_hook_is_named_with_its_remedy() -> None:
    with pytest.raises(
        PluginError, match=r"plugin from mine 0\.1: no hook named 'lightningrl_adaptors'; did you mean 'lightningrl_adapters'"
    ):
        PluginManager().register(module_with(lightningrl_adaptors=lambda: iter(())), distribution="mine 0.1")


def test_a_hook_with_an_argument_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PluginError, match=r"plugin from mine 0\.1 cannot be registered"):
        PluginManager().register(module_with(lightningrl_rollout_finished=lambda rollout: None), distribution="mine 0.1")


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
        (lambda: int("gold"), r"lightningrl_adapters raised ValueError: .*gold. \(test_plugins.py, line \d+\); fix or uninstall it"),
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


def test_a_broken_entry_point_is_named_with_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    broken = importlib.metadata.EntryPoint(name="bad", value="no_such_module_here", group="lightningrl")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    with pytest.raises(PluginError, match="plugin 'bad' of no_such_module_here cannot be loaded: ModuleNotFoundError"):
        load_plugins()
