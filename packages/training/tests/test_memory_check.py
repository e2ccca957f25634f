"""What memory is free here, by the machine and by its containers, and what is said where it is too little."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightningrl import machine
from lightningrl.backends import MemoryPlan
from lightningrl.errors import ConfigError
from lightningrl.machine import FreeMemory, free_memory
from lightningrl.recipe import Recipe
from lightningrl_training import memory_check
from lightningrl_training.memory_check import check_memory, check_tuning_memory, shared_bytes

GB = 10**9
PLAN = MemoryPlan(
    parameters=10**8,
    trained=10**8,
    weights=4 * 10**8,
    gradient=4 * 10**8,
    optimizer=8 * 10**8,
    copies=0,
    token=10**6,
    microbatch=2000,
    vocabulary=1000,
    key_values=1,
    remembered=0,
    max_batch=128,
)
RECIPE = Recipe.model_validate(
    {
        "agent": "a.py:b",
        "tasks": {"train": "a.py:t"},
        "policy": {"model": "m"},
        "rewards": {"r": {"use": "a.py:r"}},
        "sampling": {"max_tokens": 32},
    }
)


def planning(plan: MemoryPlan) -> Any:
    """Plugins whose one trainer backend plans this for every policy."""

    class Factory:
        def plan_memory(self, **settings: Any) -> MemoryPlan:
            return plan

    return SimpleNamespace(find=lambda hook, name: SimpleNamespace(factory=Factory()))


def with_free(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there = FreeMemory(free=free, total=8 * GB, where="the container's 8.00 GB")
    monkeypatch.setattr(memory_check, "free_memory", lambda: there)


def test_too_little_memory_is_one_sentence_of_what_is_needed_what_is_there_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_free(GB, monkeypatch)
    with pytest.raises(ConfigError) as refused:
        check_memory(RECIPE, {"policy": "m"}, planning(PLAN))
    said = str(refused.value)
    assert "policy 'policy' needs at least 1.92 GB of memory to learn (0.40 GB weights, 0.40 GB their gradient" in said
    assert "0.80 GB Adam's moments, 0.26 GB activations of 256 tokens" in said
    assert "1.00 GB are free (the container's 8.00 GB)" in said
    assert "--set learner.lora=true: 1.20 GB less" in said and "sampling.max_tokens = 32" in said
    assert "\n" not in said


def test_memory_that_a_full_microbatch_may_not_fit_into_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free(3 * GB, monkeypatch)
    with caplog.at_level(logging.WARNING):
        check_memory(RECIPE, {"policy": "m"}, planning(PLAN))
    (said,) = caplog.messages
    assert "may need 3.68 GB" in said
    assert "--set learner.max_tokens_per_microbatch=512: 1.49 GB less" in said


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, on_gpu=True)])
def test_nothing_is_said_where_there_is_enough_or_a_gpu_has_it(
    plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free(1 if plan.on_gpu else 8 * GB, monkeypatch)
    check_memory(RECIPE, {"policy": "m"}, planning(plan))
    assert not caplog.messages


def test_frozen_weights_that_policies_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = replace(PLAN, gradient=0, optimizer=0, base="m", shared=3 * 10**8)
    assert shared_bytes({"a": adapters, "b": adapters, "c": replace(adapters, base="n"), "d": PLAN}) == 3 * 10**8
    with_free(GB // 4, monkeypatch)
    two = RECIPE.model_copy(update={"policies": {"b": RECIPE.policy}})
    assert list(two.all_policies) == ["policy", "b"]
    with pytest.raises(ConfigError, match=r"policy 'policy' and 'b' needs at least .* \(0\.50 GB weights, 0\.26 GB"):
        check_memory(two, {"policy": "m", "b": "m"}, planning(adapters))


def test_tuning_is_refused_by_its_longest_row_and_warned_of_by_its_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = planning(PLAN).find("", "").factory
    with_free(2 * GB, monkeypatch)
    check_tuning_memory("policy", factory, {}, longest=100, batch=300)
    assert not caplog.messages
    check_tuning_memory("policy", factory, {}, longest=100, batch=600)
    assert "may need 2.27 GB of memory to learn" in caplog.text and "activations of 600 tokens" in caplog.text
    assert "max_tokens_per_microbatch=512: 0.09 GB less" in caplog.text
    with pytest.raises(ConfigError, match=r"at least 2\.17 GB .* 0\.50 GB activations .* the longest has 500"):
        check_tuning_memory("policy", factory, {}, longest=500, batch=600)
    check_tuning_memory("policy", object(), {}, longest=500, batch=600)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "groups", "free", "where"),
    [
        ("0::/", {}, 6 * GB, "MemAvailable of 8.00 GB"),
        (
            "0::/pod/me",
            {
                "pod/memory.max": str(4 * GB),
                "pod/memory.current": str(2 * GB),
                "pod/memory.stat": f"anon 1\ninactive_file {GB}",
                "pod/me/memory.max": "max",
            },
            3 * GB,
            "the container's 4.00 GB",
        ),
        (
            "5:cpu,memory:/me",
            {
                "memory/me/memory.limit_in_bytes": str(2 * GB),
                "memory/me/memory.usage_in_bytes": str(GB),
                "memory/me/memory.stat": "total_inactive_file 0",
            },
            GB,
            "the container's 2.00 GB",
        ),
        (
            "0::/",
            {"memory.max": str(GB), "memory.current": str(2 * GB), "memory.stat": ""},
            0,
            "the container's 1.00 GB",
        ),
    ],
    ids=["none", "version 2, of a parent", "version 1", "beyond it"],
)
def test_what_is_free_is_the_least_that_machine_and_containers_leave(
    cgroup: str, groups: dict[str, str], free: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"proc/self/cgroup": cgroup, "groups/x": ""})
    write(tmp_path / "groups", groups)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GB, available=6 * GB))
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "groups")
    found = free_memory()
    assert found is not None and abs(found.free - free) < 2048 and found.where == where


def test_a_system_that_does_not_say_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert free_memory() is None
    check_memory(RECIPE, {"policy": "m"}, planning(PLAN))
