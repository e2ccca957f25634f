"""The credit X-ray: the run's own credit found again exactly, and every other method beside it."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import recorded_runs
from recorded_runs import branch_by_hand, make_recipe, record_run
from sizes import PATIENCE_S
from typer.testing import CliRunner

import lightningrl
from lightningrl.commands import app
from lightningrl.errors import LightningError
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Advantages, Evidence, TrajectoryGroup
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_credit.xray import XRay
from lightningrl_runs.reader import open_run
from lightningrl_runs.xray import Question
from lightningrl_testing.groups import make_group
from lightningrl_training.commands.xray import read_steps
from lightningrl_training.lab.xray import TriedMethod, open_xray
from lightningrl_training.run import Run
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.credit import CreditXRays
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.runs import OneRun

TURNS = {"intermediate_rewards.turn.use": "tool_status"}
OWN: dict[str, Mapping[str, Any]] = {
    "grpo": {"credit.use": "grpo"},
    "dr_grpo": {"credit.use": "dr_grpo"},
    "rloo": {"credit.use": "rloo"},
    "turns": {"credit.use": "turns", "credit.options.gamma": 0.9, **TURNS},
    "states": {"credit.use": "states", "credit.options": {"key": "tool_result", "shrinkage": 2.0}},
    "sum by role": {"credit.use": "sum", "credit.options": {"parts": [{"use": "states", "compare": "role"}]}},
    "sum": {
        "credit.use": "sum",
        "credit.options": {"parts": [{"use": "turns", "weight": 0.5}, {"use": "states"}]},
        **TURNS,
    },
    "by role": {"credit.use": "grpo", "credit.compare": "role"},
    "whitened": {"credit.use": "reinforce", "credit.whiten": True},
    "per reward": {"credit.use": "grpo", "credit.per_reward": True},
    "dynamic sampling": {"credit.use": "grpo", "loop.dynamic_sampling": 1.0, "loop.group_size": 2},
    "branches": {"credit.use": "branches", "credit.options.samples": 2},
    "trained branches": {
        "credit.use": "branches",
        "credit.options": {"samples": 2, "train": True},
        "credit.whiten": True,
    },
}


def recorded(folder: Path, settings: Mapping[str, Any], **sizes: int) -> Run:
    asyncio.run(record_run(folder, make_recipe(folder, settings), **sizes))
    return Run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of two steps, trained by `turns`."""
    return recorded(tmp_path_factory.mktemp("run") / "one", OWN["turns"])


@pytest.mark.parametrize("settings", OWN.values(), ids=OWN)
def test_the_runs_own_method_finds_its_credit_again_exactly(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    run = recorded(tmp_path / "run", settings)
    xray = run.xray()
    assert xray.own_difference == 0.0, xray.missing
    assert xray.steps == (1, 2)
    assert xray.methods[0].is_own and xray.methods[0].silent is not None and xray.methods[0].silent < 1.0
    assert all(one.change == 0.0 for one in run.recredit())


def by_name(xray: XRay) -> dict[str, Any]:
    return {method.name: method for method in xray.methods}


def test_methods_that_are_one_on_these_rollouts_say_so_and_others_show_where_they_differ(run: Run) -> None:
    methods = by_name(xray := run.xray(methods={"a sum of one": {"use": "sum", "options": {"parts": ["grpo"]}}}))
    assert xray.own == "run"
    assert methods["a sum of one"].same_as == "grpo"
    assert methods["run by role"].same_as == "run", "the run has one role"
    assert methods["run whitened"].same_as is None
    assert methods["dr_grpo"].same_as is None, "of another size"
    assert methods["grpo"].outcome.flips == methods["dr_grpo"].outcome.flips == 0.0
    assert methods["dr_grpo"].outcome.rank == pytest.approx(1.0)
    assert methods["run"].own.rank == pytest.approx(1.0)
    assert methods["grpo"].own.rank is not None and 0.9 < methods["grpo"].own.rank < 1.0, "pay of 0.1 moves calls a bit"
    assert methods["reinforce"].silent > methods["turns"].silent
    prompt, tool_result = xray.anchors["prompt"], xray.anchors["tool_result"]
    assert prompt is not None and tool_result is not None and 0.0 <= prompt < tool_result < 1.0


def test_what_the_evidence_does_not_allow_is_named_with_its_remedy(run: Run) -> None:
    missing = {method.name: method.why for method in run.xray().missing}
    assert missing.keys() == {"branches", "sum", "clip", "turn_gae", "judge", "teacher"}
    assert missing["judge"] == "needs 'judge'; add a [judge] table with base_url and model"
    assert "credit.use = 'branches'" in missing["branches"]
    assert "needs the setting 'parts'" in missing["sum"]


def test_the_rollouts_that_methods_disagree_on_come_first(run: Run) -> None:
    found = run.xray(most=None).rollouts
    flips = [one.flips for one in found]
    assert len(found) == 16 and flips == sorted(flips, reverse=True) and flips[0] > flips[-1]
    (alone,) = run.xray(rollout=found[0].rollout_id).rollouts
    assert alone == found[0]
    assert alone.roles[:2] == ("search", "answer")
    assert all(len(values) == len(alone.roles) for values in alone.credit.values())


def test_a_step_is_as_it_is_in_the_whole_run(run: Run) -> None:
    whole = {one.rollout_id: one.credit for one in run.xray(most=None).rollouts}
    second = run.xray(steps=[2], most=None)
    assert second.steps == (2,) and second.rollout_count == 8
    assert all(whole[one.rollout_id] == one.credit for one in second.rollouts)


def test_a_whitened_group_is_as_its_whole_step_made_it(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", OWN["whitened"])
    first = run.xray(most=None).rollouts[0]
    (alone,) = run.xray(rollout=first.rollout_id).rollouts
    assert alone.credit == first.credit


class Remembering(CreditAssigner):
    """Credit that grows with each step: only who begins with the first finds that of the second."""

    requires: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.steps = 0

    def assign(self, group: lightningrl.TrajectoryGroup) -> Any:
        return tuple(
            tuple(
                np.full(len(call.completion_ids), self.steps + (one.reward or 0.0), np.float32)
                for call in one.transitions
            )
            for one in group.trajectories
        )

    def finish_step(self, groups: object, advantages: object) -> dict[str, float]:
        self.steps += 1
        return {}

    def state(self) -> int:
        return self.steps

    def load(self, state: int) -> None:
        self.steps = state


def test_a_method_that_remembers_is_found_again_at_any_step(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"credit.use": f"{__file__}:Remembering"})
    assert run.xray().own_difference == 0.0
    assert run.xray(steps=[2]).own_difference == 0.0

    async def look_again() -> list[float | None]:
        async with open_xray(run.folder) as xray:
            return [(await xray.of_run([step])).own_difference for step in (1, 2, 2)]

    assert asyncio.run(look_again()) == [0.0] * 3, "also where earlier steps were looked at before"


def test_measured_states_stand_beside_every_method(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", OWN["branches"])
    xray = run.xray(most=None)
    measured = [one for one in xray.rollouts if one.measured is not None]
    assert len(measured) == xray.branched > 0
    methods = by_name(xray)
    assert methods["branches"].measured.rank == pytest.approx(1.0)
    assert methods["grpo"].measured.calls == sum(value is not None for one in measured for value in one.measured or ())


def test_rollouts_branched_by_hand_are_found_in_the_runs_folder(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"credit.use": "grpo"})
    asyncio.run(branch_by_hand(run.folder, "g000001-001", step=2))
    xray = run.xray(most=None)
    (measured,) = [one for one in xray.rollouts if one.measured is not None]
    assert measured.rollout_id == "g000001-001"
    assert xray.own_difference == 0.0, "what was measured afterwards changes no credit"
    assert xray.branched == 1 and by_name(xray)["grpo"].measured.calls == len(measured.roles)


def test_methods_of_ones_own_stand_beside_those_installed(run: Run) -> None:
    added = {"mine": f"{__file__}:Remembering", "clip": {"use": "clip", "options": {"of": {"use": "grpo"}, "at": 0.1}}}
    methods = by_name(run.xray(methods=added))
    assert methods["clip"].same_as is None and "mine" in methods
    with pytest.raises(lightningrl.ConfigError, match="there is a method 'grpo' already"):
        run.xray(methods={"grpo": "dr_grpo"})
    with pytest.raises(lightningrl.ConfigError, match=r"method 'mine': .*no credit assigner named 'grop'"):
        run.xray(methods={"mine": "grop"})


def test_what_is_not_there_is_one_sentence(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        lightningrl.ConfigError, match=r"has no trained rollouts of step 7; it has those of steps 1 to 2"
    ):
        run.xray(steps=[7])
    with pytest.raises(lightningrl.LightningError, match="no rollout 'nobody'; near it are"):
        run.xray(rollout="nobody")
    empty = recorded(tmp_path / "run", {}, steps=0)
    with pytest.raises(lightningrl.LightningError, match="has trained no step yet"):
        empty.xray()


def test_credit_that_can_no_longer_be_computed_is_shown_as_it_was_used(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    run = recorded(tmp_path / "run", {"credit.use": f"{tmp_path}/mine.py:Remembering"})
    (tmp_path / "mine.py").unlink()
    xray = run.xray()
    assert xray.own_difference is None
    assert by_name(xray)["run"].own.calls == xray.calls > 0
    assert "no file" in next(method.why for method in xray.missing if method.name == "run")


@pytest.mark.parametrize("use", ["evil.py:Credit", "evil:Credit", "pack.evil:Credit", "linked/evil.py:Credit"])
@pytest.mark.parametrize("is_part", [False, True], ids=["itself", "part"])
def test_code_in_a_run_of_somebody_else_is_not_run_by_a_look_at_it(tmp_path: Path, use: str, is_part: bool) -> None:
    run = recorded(tmp_path / "run", {"credit.use": "grpo"})
    for file in ("evil.py", "pack/evil.py"):
        (run.folder / file).parent.mkdir(exist_ok=True)
        (run.folder / file).write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Credit: ...\n")
    (run.folder / "linked").symlink_to(run.folder)
    recipe = json.loads((run.folder / "recipe.json").read_text())
    recipe["credit"] = {"use": "sum", "options": {"parts": [{"use": use}]}} if is_part else {"use": use}
    (run.folder / "recipe.json").write_text(json.dumps(recipe))
    xray = Run(run.folder).xray()
    assert not (tmp_path / "was run").exists()
    assert "its code lies in the run's own folder" in " ".join(method.why for method in xray.missing)


def test_a_long_text_with_a_colon_among_the_options_is_no_file(tmp_path: Path) -> None:
    rubric = "A turn is good that:\n" + "- brings the task nearer\n" * 400 + "and: ends it\0"
    run = recorded(tmp_path / "run", {"credit.use": "grpo"})
    recipe = json.loads((run.folder / "recipe.json").read_text())
    recipe["credit"] = {"use": "judge", "options": {"per": "turn", "rubric": rubric}}
    (run.folder / "recipe.json").write_text(json.dumps(recipe))
    missing = Run(run.folder).xray().missing
    assert missing and not any("own folder" in str(method.why) for method in missing)


# ------------------------------------------------------------------ the terminal


def ask(*words: str) -> str:
    answer = CliRunner().invoke(app, [*words], env={"COLUMNS": "160"})
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_the_terminal_and_the_json_say_the_same(run: Run) -> None:
    said = ask("xray", str(run.folder))
    assert "the run's own method gives exactly what the run used" in said
    assert "on these rollouts equal to run" in said
    found = json.loads(ask("xray", str(run.folder), "--steps", "1-2", "--json"))
    assert found == json.loads(msgspec.json.encode(run.xray()))
    shown = ask("xray", str(run.folder), "--rollout", found["rollouts"][0]["rollout_id"])
    assert "run = run by role (own)" in shown and "1 answer" in shown


def test_steps_are_read_as_people_write_them() -> None:
    assert read_steps("3-5, 9") == [3, 4, 5, 9]
    for text in ("", "5-3", "a", "1-99999999"):
        with pytest.raises(lightningrl.ConfigError, match="are none that can be read"):
            read_steps(text)


# ------------------------------------------------------------------ the rewards lab


def upside_down(task: lightningrl.Task, output: int, trajectory: lightningrl.Trajectory) -> float:
    return 1.0 - output % 2


def always(task: lightningrl.Task, output: int, trajectory: lightningrl.Trajectory) -> float:
    if trajectory.rollout_id.endswith("000"):
        raise RuntimeError("on fire")
    return 1.0


def test_a_reward_is_tried_on_recorded_rollouts(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"credit.use": "dr_grpo"})
    store = (run.folder / "store.sqlite").read_bytes()
    turned = run.rescore(upside_down)
    assert turned.before.mean is not None and turned.after.mean == pytest.approx(1.0 - turned.before.mean)
    assert turned.credit.rank == pytest.approx(-1.0)
    assert (turned.gained, turned.lost) == ((), ())
    assert len(turned.changed) == turned.before.rewarded
    assert [one.flips for one in turned.changed] == sorted((one.flips for one in turned.changed), reverse=True)
    assert turned.before.histogram == turned.after.histogram[::-1]
    same = run.rescore(f"{recorded_runs.__file__}:coin")
    assert same.changed == () and same.credit.flips == 0.0
    assert (run.folder / "store.sqlite").read_bytes() == store


def test_a_reward_that_fails_on_some_rollouts_is_counted_and_they_have_the_lowest(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"credit.use": "dr_grpo"})
    found = run.rescore(always)
    failed = [one for one in found.changed if "RuntimeError: on fire" in (one.failed or "")]
    assert found.failures == found.groups > 0, "one in each group"
    assert failed and all(one.after == 0.0 for one in failed), "the lowest, as the reward works on others"
    assert found.after.rewarded == found.before.rewarded == found.rollouts
    assert found.lost == (), "the one that failed is below the others of its group"


def test_steps_that_the_run_does_not_have_are_named_and_no_reward_is_tried_on_the_others(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"credit.use": "dr_grpo"})
    missing = r"has no trained rollouts of steps 0, 3 to 4, 9; it has those of steps 1 to 2"
    with pytest.raises(lightningrl.ConfigError, match=missing):
        run.rescore(upside_down, steps=read_steps("0-4,9"))
    with pytest.raises(lightningrl.ConfigError, match=missing):
        run.recredit("rloo", steps=[9, 4, 3, 2, 0])
    assert {one.step for one in run.recredit("rloo", steps=[2])} == {2}


def test_which_reward_is_meant_has_to_be_said(tmp_path: Path) -> None:
    run = recorded(
        tmp_path / "run", {"rewards.short.use": f"{recorded_runs.__file__}:coin", "rewards.short.weight": 0.5}, steps=1
    )
    with pytest.raises(
        lightningrl.ConfigError, match=r"has the rewards 'right', 'short'; say with --name which is meant"
    ):
        run.rescore(upside_down)
    with pytest.raises(lightningrl.ConfigError, match=r"has no reward 'long'; choose one of: right, short"):
        run.rescore(upside_down, name="long")
    with pytest.raises(lightningrl.ConfigError, match="no reward is given"):
        run.rescore()
    dotted = recorded(tmp_path / "dotted", {'rewards."v1.5".use': f"{recorded_runs.__file__}:coin"}, steps=1)
    assert dotted.rescore(upside_down, name="v1.5").rollouts == 8
    halved = run.rescore(settings={"rewards.short.weight": 0.0})
    assert halved.after.mean == pytest.approx((halved.before.mean or 0.0) / 1.5)
    said = ask("rescore", str(run.folder), "--reward", f"{__file__}:upside_down", "--name", "short")
    assert "rollouts would have another reward" in said
    assert json.loads(ask("rescore", str(run.folder), "--set", "rewards.short.weight=0", "--json"))["rollouts"] == 8


# ------------------------------------------------------------------ the page


async def pages(run: Run, *paths: str) -> list[httpx.Response]:
    async with open_run(run.folder) as stored:
        viewed = ViewedRun(name="one", folder=run.folder, run=stored)
        try:
            transport = httpx.ASGITransport(create_viewer(OneRun(viewed), key="view-key"))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", follow_redirects=True
            ) as client:
                await client.get("/?key=view-key")
                return [await client.get(path) for path in paths]
        finally:
            viewed.credit.close()


async def test_the_page_shows_turns_by_methods_what_they_disagree_on_first(run: Run) -> None:
    first = run.xray(steps=[2]).rollouts[0]
    step, group, rollout, whole, none = await pages(
        run,
        "/credit",
        f"/credit?group={first.group_id}",
        f"/credit?rollout={first.rollout_id}&turn=1",
        "/credit?of=run",
        "/credit?rollout=nobody",
    )
    assert [answer.status_code for answer in (step, group, rollout, whole)] == [200] * 4
    assert "Credit of step 2" in step.text and 'href="/credit?step=1"' in step.text
    assert step.text.index(first.rollout_id) < step.text.index("Methods</h2>")
    assert re.search(r'class="n up-5">\+', step.text) and re.search(r'class="n down-\d">−', step.text)
    assert "equals run" in step.text and "[judge] table" in step.text
    assert f"Credit of group <bdi>{first.group_id}</bdi>" in group.text
    assert ">1 <bdi" in rollout.text and ">0 <bdi" not in rollout.text
    assert "of the whole run" in whole.text
    assert none.status_code == 404 and "no rollout &#39;nobody&#39;" in none.text
    assert all("style=" not in answer.text for answer in (step, group, rollout, whole)), "as the page's CSP demands"


async def test_the_page_outlives_the_process_that_computes_it(run: Run) -> None:
    xrays = CreditXRays(run.folder)
    try:
        before = await xrays.ask(Question(step=1))
        process = xrays._steps._process
        assert process is not None
        process.kill()
        process.wait()
        assert await xrays.ask(Question(step=1)) == before
    finally:
        xrays.close()


LOUD = """
import os
from lightningrl_credit.baselines import IdenticalAssignment

class Loud(IdenticalAssignment):
    def assign(self, group):
        print("crediting", len(group.trajectories), flush=True)
        os.write(1, b"as C and children print: {}\\n")
        return super().assign(group)
"""


async def test_code_that_prints_breaks_no_answer_and_shifts_none(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD, encoding="utf-8")
    run = await asyncio.to_thread(recorded, tmp_path / "run", {"credit.use": f"{tmp_path}/loud.py:Loud"})
    xrays = CreditXRays(run.folder)
    try:
        answers = [await xrays.ask(Question(step=step)) for step in (1, 2)]
    finally:
        xrays.close()
    assert [answer.xray and (answer.xray.steps, answer.xray.own_difference) for answer in answers] == [
        ((1,), 0.0),
        ((2,), 0.0),
    ]


WAITING = """
from pathlib import Path
from lightningrl_credit.baselines import IdenticalAssignment

class Waiting(IdenticalAssignment):
    def assign(self, group):
        gate = Path(__file__).with_name("gate")
        if gate.exists():
            gate.read_bytes()
        return super().assign(group)
"""


async def test_pages_that_wait_for_an_xray_leave_the_servers_threads_to_others(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING, encoding="utf-8")
    run = await asyncio.to_thread(recorded, tmp_path / "run", {"credit.use": f"{tmp_path}/waiting.py:Waiting"})
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    xrays = CreditXRays(run.folder)
    pages = [
        asyncio.create_task(xrays.ask(Question(step=1))) for _ in range(40)
    ]  # an event loop has at most 32 threads
    await asyncio.sleep(0)  # each has asked
    try:
        async with asyncio.timeout(PATIENCE_S):
            opened = await asyncio.to_thread(os.open, gate, os.O_WRONLY)  # waits until the assigner reads there
        assert not any(page.done() for page in pages)
        gate.unlink()
        os.close(opened)
        assert {answer.first for answer in await asyncio.gather(*pages)} == {1}
    finally:
        xrays.close()


async def test_a_viewer_that_ends_waits_for_no_xray(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING, encoding="utf-8")
    run = await asyncio.to_thread(recorded, tmp_path / "run", {"credit.use": f"{tmp_path}/waiting.py:Waiting"})
    os.mkfifo(tmp_path / "gate")
    xrays = CreditXRays(run.folder)
    pages = [asyncio.create_task(xrays.ask(Question(step=1))) for _ in range(3)]
    opened = await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY)  # waits until the assigner reads there
    xrays.close()
    os.close(opened)
    assert {type(answer) for answer in await asyncio.gather(*pages, return_exceptions=True)} <= {
        LightningError,
        asyncio.CancelledError,
    }


async def test_names_that_an_agent_made_up_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_runs, "ROLES", ("<script>alert(1)</script>", "\x1b[2J\u202eevil"))
    run = await asyncio.to_thread(recorded, tmp_path / "run", OWN["turns"], steps=1)
    (page,) = await pages(run, "/credit?group=g000000")
    assert "<script>alert" not in page.text and "&lt;script" in page.text
    shown = await asyncio.to_thread(ask, "xray", str(run.folder), "--rollout", "g000000-000")
    assert not {"\x1b[2J", "\u202e"} & {shown[at : at + size] for at in range(len(shown)) for size in (1, 4)}
    assert all(char not in page.text for char in "\x1b\u202e")


@pytest.mark.parametrize(
    ("has_evidence", "why"),
    [
        (False, "needs 'judge'; add a [judge] table with base_url and model"),
        (
            True,
            "credit assigner 'Broken' failed for group 'g': ZeroDivisionError: division by zero (test_credit_xray.py, line LINE); mend it",
        ),
    ],
)
def test_arithmetic_that_broke_is_told_as_it_is_and_not_as_evidence_that_lacks(has_evidence: bool, why: str) -> None:
    class Broken(CreditAssigner):
        requires = frozenset({"judge"})

        def assign(self, group: TrajectoryGroup) -> Advantages:
            raise ZeroDivisionError("division by zero")

    group = make_group((0.0,), (1.0,))
    heard = [replace(one, evidence=Evidence(calls={"grade": np.zeros(1, np.float32)})) for one in group.trajectories]
    scorer = Scorer(
        rewards=RewardWeights([WeightedReward(name="right")]),
        credit=Broken(),
        samples=SamplesConfig(),
        trained={"policy": TrainedCalls()},
    )
    method = TriedMethod(name="broken", summary="", scorer=scorer, requires=Broken.requires)
    assert method.credit([replace(group, trajectories=tuple(heard)) if has_evidence else group]) is None
    assert method.why == why.replace("LINE", str(Broken.assign.__code__.co_firstlineno + 1))
