"""What a run outlives, and what of it is kept when it does not."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightningrl_client.control.repeats import Repeats
from lightningrl_client.recipe_file import load_recipe
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.serving import PATIENCE_S

RECIPE = 'agent = "agent.py:answer"\ntasks.train = "data.py:train"\npolicy.model = "starter"\nrewards.exact.use = "reward.py:exact"\n'


async def test_a_run_that_asked_its_agent_something_is_kept_without_a_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "recipe.toml"
    source.write_text(RECIPE)
    folder = RunFolder.create(tmp_path / "run", load_recipe(source), str(source), {}, models={"policy": "starter"})
    assert not folder.has_rollouts(), "the store is no database yet"
    store = await SqlStore.open(folder.store_url)
    assert not folder.has_rollouts()
    await store.create_rollouts([make_spec("a")])
    await store.close()
    assert folder.has_rollouts()
    folder.close()


def test_trainer_and_workers_wait_for_their_server_as_long_as_it_may_take_to_start() -> None:
    assert inspect.signature(ServerProcess).parameters["most_s"].default <= PATIENCE_S


def test_a_client_is_as_patient_after_a_request_that_took_long_as_after_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("lightningrl_client.control.repeats.time", SimpleNamespace(monotonic=lambda: now))
    repeats, at_once = Repeats(60.0), Repeats(0.0)
    now = cut = 60.0
    assert at_once.next_pause() is None
    while (pause := repeats.next_pause()) is not None:
        now += pause
    assert now - cut > 57.0
