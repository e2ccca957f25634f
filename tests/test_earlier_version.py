"""A run folder of an earlier version is shown, resumed and exported.

`support/earlier` was written by the code before computed values were kept apart and collection was a stream, and killed in its third step:
its store is of version 3, its rollouts are called `s000002-0001-000`.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashes import finish, read_metrics, read_rollouts
from processes import TrainRun
from safetensors.torch import load_file
from viewing import read_page, viewing
from warm import WarmCommand

from lightningrl.types import Outcome, RolloutState, Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_server.store.places import find_store
from lightningrl_training.run import Run

pytestmark = pytest.mark.slow
EARLIER = Path(__file__).with_name("support") / "earlier"


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainRun]:
    """`HOME` stands for where it lay."""
    shutil.copytree(EARLIER, tmp_path / "out")
    told = tmp_path / "out" / "run" / "run.json"
    told.write_text(told.read_text(encoding="utf-8").replace("HOME", str(tmp_path / "out")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run = TrainRun(warm, tmp_path / "out" / "run", tmp_path / "journal")
    yield run
    run.close()


@pytest.mark.timeout(600)
def test_a_run_of_an_earlier_version_is_shown_resumed_and_exported(run: TrainRun, tmp_path: Path, warm: WarmCommand) -> None:
    folder = run.folder
    shown = Run(folder)
    assert [line["reward"] for line in shown.metrics if "reward" in line] == [0.625, 0.5]
    assert len(shown.rollouts()) == 14
    trace = shown.trace("s000001-0001-001")
    assert trace.rollout.trained_step == 2
    assert [len(call.call.completion_ids) for call in trace.calls] == [6, 6]
    listed = warm.run("lightningrl", "rollouts", "list", "--run", str(folder), cwd=tmp_path)
    assert "s000001-0001-001" in listed.stdout, listed
    told = warm.run("lightningrl", "rollouts", "show", "s000001-0001-001", "--run", str(folder), cwd=tmp_path)
    assert "word" in told.stdout, told
    before = load_file(folder / "checkpoints" / "step-000002" / "policies" / "policy" / "trained.safetensors")

    run.start("--resume")
    finish(run)

    assert [line["step"] for line in read_metrics(folder) if "reward" in line] == [1, 2, 3]
    after = load_file(folder / "checkpoints" / "step-000003" / "policies" / "policy" / "trained.safetensors")
    assert any(not after[name].equal(before[name]) for name in before)
    rollouts = {rollout.spec.id: rollout for rollout in read_rollouts(folder)}
    third = [name for name, rollout in rollouts.items() if rollout.trained_step == 3]
    assert sorted(third) == ["g000004-000", "g000004-001", "g000005-000", "g000005-001"], "the stream goes on where two steps of it end"
    old = [rollout for name, rollout in rollouts.items() if name.startswith("s000002")]
    assert {(rollout.state, rollout.outcome) for rollout in old} == {(RolloutState.FAILED, Outcome.CANCELLED)}, "nobody waits for them"
    (first,) = asyncio.run(_read(folder, "s000000-0000-000"))
    assert first.rewards == {"letters": first.reward}

    assert shown.export(tmp_path / "policy") == 3
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    assert all(exported[name].equal(after[name]) for name in exported if name in after)


def _refuse(*address: object) -> None:
    raise AssertionError(f"somebody connects to {address}")


async def _read(folder: Path, *rollout_ids: str) -> tuple[Trajectory, ...]:
    store = await SqlStore.open(find_store(folder), read_only=True)
    try:
        return await store.trajectories(rollout_ids)
    finally:
        await store.close()


async def test_the_pages_of_a_run_of_an_earlier_version_are_shown_and_its_store_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its policy has gone. Looking fetches nothing, so nobody is asked for it."""
    monkeypatch.setattr(socket, "create_connection", _refuse)
    monkeypatch.setattr(socket.socket, "connect", _refuse)
    folder = tmp_path / "run"
    shutil.copytree(EARLIER / "run", folder)
    before = (folder / "store.sqlite").read_bytes()
    async with viewing(folder) as client:
        assert "0.625" in (await read_page(client, "/")).text
        assert "s000001-0001-001" in (await read_page(client, "/rollouts?from=2&to=2")).text
        await read_page(client, "/rollouts/s000001-0001-001?view=tokens")
        await read_page(client, "/groups/s000001-0001")
        await read_page(client, "/system")
    assert (folder / "store.sqlite").read_bytes() == before
