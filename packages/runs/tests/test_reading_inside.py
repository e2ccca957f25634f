"""What the viewer's pages stand on: why tokens have no gradient, how calls descend, where siblings part, how a store
stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import RECIPE, RecordedRun

from lightningrl.errors import RunFolderError
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome, RolloutState
from lightningrl_client.recipe_file import with_settings
from lightningrl_runs.group_diff import Siblings
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run, read_group
from lightningrl_runs.recipe import list_recipe_keys
from lightningrl_runs.trace import Link, Trace, Window, read_lineage
from lightningrl_runs.why_no_gradient import NoGradient, NoGradientKind, Token, explain_calls, explain_rollout


@pytest.fixture
def run(played_run: RecordedRun) -> RecordedRun:
    return played_run


async def look(
    run: RecordedRun, rollout_id: str, recipe: Recipe = RECIPE
) -> tuple[Trace, Mapping[str, NoGradient | None]]:
    async with open_run(run.folder) as reader:
        trace = await reader.trace(rollout_id)
        group = await read_group(reader, trace.rollout.spec.group_id)
    return trace, explain_calls(trace, group.rollouts, recipe)


async def tokens(run: RecordedRun, trace: Trace, reasons: Mapping[str, NoGradient | None]) -> list[list[Token]]:
    async with open_run(run.folder) as reader:
        return [reader.tokens(call, reasons[call.call.id]) for call in trace.calls]


async def test_a_token_has_a_reason_exactly_where_no_row_of_the_learner_moves_it(run: RecordedRun) -> None:
    trained = {"mask": 0, "moved": 0, "still": 0}
    for step, scored in enumerate(run.scored, start=1):
        for group in scored.groups:
            for trajectory in group.members:
                trace, reasons = await look(run, trajectory.rollout_id)
                assert trace.rollout.trained_step == step
                rows = [row for row in scored.samples if row.rollout_id == trajectory.rollout_id]
                for number, read in enumerate(await tokens(run, trace, reasons)):
                    expected = np.zeros(len(read), dtype=bool), np.zeros(len(read), dtype=np.float32)
                    for row in rows:
                        if (here := row.calls == number).any():
                            expected = row.mask[here], row.advantages[here]
                    assert [token.mask for token in read] == expected[0].tolist(), (trajectory.rollout_id, number)
                    assert [token.reason is None for token in read] == (expected[1] != 0).tolist()
                    trained["mask"] += int(expected[0].sum())
                    trained["moved"] += int((expected[1] != 0).sum())
                    trained["still"] += len(read) - int((expected[1] != 0).sum())
    assert all(trained.values()), "the run has tokens of every kind"


@pytest.mark.parametrize(
    ("rollout_id", "call", "kind", "words"),
    [
        ("g000001-000", 0, "equal_rewards", "All 2 rewards of its group are 0.5"),
        ("g000002-000", 0, "alone", "only rollout of its group with a reward"),
        ("g000003-000", 1, "role", "'critic' is not trained"),
        ("v000001-0000", 0, "validation", "never trained"),
        ("g000004-000", 0, "running", "has not ended"),
    ],
)
async def test_a_call_without_a_gradient_says_what_decided(
    run: RecordedRun, rollout_id: str, call: int, kind: str, words: str
) -> None:
    trace, reasons = await look(run, rollout_id)
    reason = reasons[trace.calls[call].call.id]
    assert reason is not None and reason.kind == kind and words in reason.sentence


async def test_what_the_world_ended_says_so_and_what_the_policy_broke_is_trained(run: RecordedRun) -> None:
    trace, _ = await look(run, "g000000-002")
    assert (trace.rollout.outcome, explain_rollout(trace, RECIPE)) == (Outcome.AGENT_ERROR, None)
    lost = replace(trace, rollout=replace(trace.rollout, outcome=Outcome.INFRASTRUCTURE_ERROR))
    reason = explain_rollout(lost, RECIPE)
    assert reason is not None and reason.kind is NoGradientKind.OUTCOME and "never trained" in reason.sentence


async def test_terms_beside_the_advantage_are_named(run: RecordedRun) -> None:
    trace, reasons = await look(run, "g000001-000", with_settings(RECIPE, {"learner": {"kl_coef": 0.1}}))
    reason = reasons[trace.calls[0].call.id]
    assert reason is not None and reason.sentence.endswith("learner.kl_coef moves its tokens all the same.")


async def test_a_group_that_waits_for_a_step_says_so(run: RecordedRun) -> None:
    trace, _ = await look(run, "g000000-000")
    waiting = replace(trace, rollout=replace(trace.rollout, trained_step=None))
    reason = explain_rollout(waiting, RECIPE)
    assert reason is not None and reason.kind is NoGradientKind.NOT_TAKEN


async def test_tokens_have_their_text_logprob_advantage_and_version(run: RecordedRun) -> None:
    trace, reasons = await look(run, "g000000-000")
    (call, *_), (first, *_) = trace.calls, await tokens(run, trace, reasons)
    assert "".join(token.text for token in first) == "".join(part.text for part in call.segments if part.is_sampled)
    assert [token.id for token in first] == call.call.completion_ids.tolist()
    assert [token.logprob for token in first] == call.call.logprobs.tolist()
    # 1 less the mean of 1, 0 and the 0 of one that raised
    assert {token.advantage for token in first} == {float(np.float32(2 / 3))}
    assert {token.version for token in first} == {0}
    async with open_run(run.folder) as reader:
        assert reader.tokens(call, None, start=2, count=3) == first[2:5]


async def test_a_window_reads_some_calls_and_leaves_out_the_middle_of_a_long_one(run: RecordedRun) -> None:
    async with open_run(run.folder) as reader:
        whole = await reader.trace("g000000-000")
        some = await reader.trace("g000000-000", Window(first=1, calls=1, tokens=30))
        (head, tail) = (some.calls[0].segments, some.calls[1].segments)
        assert head == () and [call.seen for call in some.calls] == [call.seen for call in whole.calls]
        (gap,) = [segment for segment in tail if not segment.text]
        read = sum(segment.end - segment.start for segment in tail if segment is not gap)
        assert (read, tail[0].start, tail[-1].end) == (
            30,
            whole.calls[1].segments[0].start,
            whole.calls[1].segments[-1].end,
        )
        left_out = await reader.row_text("g000000-000", 1, gap.start, gap.end)
        assert "".join(segment.text or left_out or "" for segment in tail) == "".join(
            part.text for part in whole.calls[1].segments
        )


async def test_lineage_shows_parents_breaks_and_what_happened_on_the_way(run: RecordedRun) -> None:
    trace, _ = await look(run, "g000003-000")
    nodes = read_lineage(trace)
    assert [(node.index, node.depth, node.parent, node.link) for node in nodes] == [
        (0, 0, None, Link.STARTS),
        (1, 1, 0, Link.CONTINUES),
        (2, 1, 0, Link.BREAK),
    ]
    assert [node.agent for node in nodes] == ["planner", "critic", "planner"]
    assert sum(node.judged for node in nodes) == 1
    shopped, _ = await look(run, "g000000-000")
    assert [(node.failed_tools, node.link) for node in read_lineage(shopped)] == [(1, Link.STARTS), (0, Link.CONTINUES)]
    failed, _ = await look(run, "g000000-002")
    assert [node.refused for node in read_lineage(failed)] == [1]


async def siblings(run: RecordedRun, group: str) -> Siblings:
    async with open_run(run.folder) as reader:
        return await reader.siblings(group)


async def test_siblings_stand_side_by_side_from_where_they_part(run: RecordedRun) -> None:
    group = await siblings(run, "g000003")
    assert [one.rollout.spec.id for one in group.rollouts] == ["g000003-000", "g000003-001"]
    assert group.divergence is not None and (group.divergence.call, group.divergence.in_prompt) == (2, False)
    assert [call.text.partition("<")[0] for call in group.shared] == ["plan", "fine"]
    bought, sold = (one.calls[0] for one in group.rollouts)
    assert bought.text[bought.same :].startswith("buy") and sold.text[sold.same :].startswith("sell")
    assert [one.calls[0].mean_advantage for one in group.rollouts] == [0.5, -0.5]
    assert (group.mean, group.std) == (0.5, 0.5)


async def test_siblings_that_never_part_share_everything_and_a_running_one_has_none(run: RecordedRun) -> None:
    same = await siblings(run, "g000001")
    assert same.divergence is None and len(same.shared) == 1
    assert [len(one.calls) for one in same.rollouts] == [0, 0]
    running = await siblings(run, "g000004")
    assert [one.calls for one in running.rollouts] == [(), ()] and running.mean is None
    assert (await siblings(run, "nobody")).rollouts == ()


async def test_an_overview_counts_what_the_store_has(run: RecordedRun) -> None:
    async with open_run(run.folder) as reader:
        found, position = await reader.queries.health(), await reader.queries.position()
        later = await reader.queries.position(after=1)
    assert found.states == {
        RolloutState.SUCCEEDED: 8,
        RolloutState.FAILED: 1,
        RolloutState.RUNNING: 1,
        RolloutState.QUEUED: 1,
    }
    assert found.outcomes == {Outcome.SUCCEEDED: 8, Outcome.AGENT_ERROR: 1}
    assert [(one.policy, one.version, one.trainable) for one in found.versions] == [("policy", 0, True)]
    (worker,) = found.workers
    assert (worker.worker_id, worker.running, worker.failed, worker.attempts) == ("worker-1", 1, 2, found.attempts_read)
    assert [lease.rollout_id for lease in found.leases] == ["g000004-000"]
    assert {(one.name, one.count, one.rollout_id) for one in found.failures} == {
        (Outcome.AGENT_ERROR, 1, "g000000-002"),
        (Outcome.INFRASTRUCTURE_ERROR, 1, "g000002-000"),
    }
    (refusal,) = found.refusals
    assert (refusal.count, refusal.rollout_id, refusal.status) == (1, "g000000-002", 400)
    assert (position.step, position.running, position.later_steps, later.later_steps) == (2, 1, (1, 2), (2,))
    assert position.attempt == found.attempts_read


def test_each_key_of_a_recipe_says_its_value_its_default_and_its_reader(run: RecordedRun) -> None:
    origin = RunOrigin.read(run.folder)
    keys = {one.key: one for one in list_recipe_keys(origin.recipe, settings=origin.settings, values=origin.values)}
    assert origin.recipe.loop == RECIPE.loop
    assert (keys["loop.steps"].value, keys["loop.steps"].origin) == (2, "--set")
    assert (keys["loop.group_size"].is_default, keys["loop.group_size"].origin) == (False, "recipe")
    assert (keys["loop.seed"].is_default, keys["loop.seed"].origin) == (True, "default")
    assert keys["agent"].is_default is None
    assert (keys["validation.sampling.max_tokens"].is_default, keys["validation.sampling.temperature"].is_default) == (
        True,
        True,
    )
    assert keys["credit.options.parts"].reader == "credit assigner 'sum'"
    assert keys["loop.group_size"].about == "Rollouts per task, G."
    assert keys["rewards.right.timeout_s"].is_default and keys["rewards.right.agents"].about.startswith(
        "Roles that this reward pays"
    )
    assert keys["policy.trained_agents"].about.startswith("Roles whose calls are trained")
    assert all(one.reader for one in keys.values())


def test_a_setting_whose_key_holds_a_dot_is_known_as_one() -> None:
    told = {'policies."qwen2.5".model': "small", 'upstream.models."gpt-4.1*".model': "large"}
    recipe = with_settings(RECIPE, {"upstream.base_url": "http://127.0.0.1:1/v1", **told})
    origins = {key.key: key.origin for key in list_recipe_keys(recipe, settings=told)}
    assert origins["policies.qwen2.5.model"] == origins["upstream.models.gpt-4.1*.model"] == "--set"


def test_a_folder_without_a_recipe_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run in .* that has a recipe"):
        RunOrigin.read(tmp_path)
