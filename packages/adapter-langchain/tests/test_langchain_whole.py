"""The whole way of an unmodified LangGraph agent: worker, redirection, adapter, real gateway, real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Outcome, ToolStatus
from lightningrl_credit import IdenticalAssignment
from lightningrl_credit.rewards.value import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls, read_answers, side_calls
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, repeated_calls, running_services
from lightningrl_training.explanations import explain_silence

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).parent
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer())
    async with running_services(tmp_path_factory.mktemp("whole"), engine=engine) as path:
        yield path


async def test_roles_and_spans_reach_the_calls_each_can_be_branched_at_and_a_long_prompt_overflows(
    path: WholePath,
) -> None:
    async with path.workers("graph_agents.py:answer", adapters=["langchain"], base_dir=HERE):
        for kind in ("sync", "async", "stream", "async_stream", "threads"):
            trajectory = await path.run_one(kind, {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            each = 3 if kind == "threads" else 1
            assert [transition.agent for transition in trajectory.transitions] == ["draft"] * each + ["review"] * each
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == 2 * each
            for calls in range(len(trajectory.transitions) + 1):
                branch = await path.branch(trajectory, calls)
                assert (branch.outcome, repeated_calls(branch, trajectory.transitions)) == (Outcome.SUCCEEDED, calls), (
                    branch.error
                )
        trajectory = await path.run_one("long", {"kind": "sync", "text": "a long story " * 3000})
    assert (trajectory.outcome, trajectory.transitions) == (Outcome.CONTEXT_OVERFLOW, ())


async def test_a_tool_that_a_node_calls_itself_is_joined_to_the_transition_that_asked(path: WholePath) -> None:
    path.engine.enqueue(f"{TOOL_CALL}\n{TOOL_CALL.replace('22', '1')}", "the sum is 42")
    async with path.workers("graph_agents.py:add_by_hand", adapters=["langchain"], base_dir=HERE):
        trajectory = await path.run_one("by-hand", "what is 20 + 22?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    asking = trajectory.transitions[0]
    assert [(tool.id, tool.transition_id, tool.result) for tool in trajectory.tool_calls] == [
        (call_id, asking.id, result) for call_id, result in zip(asking.tool_call_ids, ("42", "21"), strict=True)
    ]


async def test_a_tool_call_is_joined_to_the_transition_that_asked(path: WholePath) -> None:
    path.engine.enqueue(TOOL_CALL, "the sum is 42")
    async with path.workers("graph_agents.py:add_with_tools", adapters=["langchain"], base_dir=HERE):
        trajectory = await path.run_one("tool", "what is 20 + 22?")
        branches = [await path.branch(trajectory, calls) for calls in range(3)]
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    (tool,) = trajectory.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "model")
    assert tool.transition_id == trajectory.transitions[0].id
    assert tool.id in trajectory.transitions[0].tool_call_ids
    assert [repeated_calls(branch, trajectory.transitions) for branch in branches] == [0, 1, 2]
    assert [branch.output for branch in branches] == ["ok", "ok", "the sum is 42"], "the tool ran again"
    assert [len(branch.tool_calls) for branch in branches] == [0, 1, 1]


@pytest.mark.parametrize(
    ("adapters", "roles"),
    [
        ((), [None] * 5),
        (("langchain",), [None, "model", "model", "SummarizationMiddleware.before_model", "model"]),
    ],
    ids=["by base URL alone", "with the adapter"],
)
async def test_the_summary_that_an_agent_makes_of_its_own_history_is_trained_and_a_title_is_not(
    path: WholePath, adapters: tuple[str, ...], roles: list[str | None]
) -> None:
    summary = "  The user wants the sum of 20 and 22. The tool was asked twice, and said 42 both times.\n"
    path.engine.enqueue("Summing two numbers", TOOL_CALL, TOOL_CALL, summary, "the sum is 42")
    async with path.workers("graph_agents.py:summarised", adapters=adapters, base_dir=HERE):
        trajectory = await path.run_one(f"summarised-{len(adapters)}", "what is 20 + 22?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    title, first, second, compaction, last = trajectory.transitions
    assert [call.agent for call in trajectory.transitions] == roles
    assert [call.parent_id for call in trajectory.transitions] == [None, None, first.id, None, None]
    assert not any(call.is_break for call in trajectory.transitions), "each asks in a history of its own"
    assert side_calls(trajectory.transitions) == {title.id}
    assert read_answers(trajectory.transitions) == ({} if adapters else {compaction.id: last.id})
    rewards, trained = RewardWeights([WeightedReward(name="reward")]), {"policy": TrainedCalls()}
    scorer = Scorer(rewards=rewards, credit=IdenticalAssignment(), samples=SamplesConfig(), trained=trained)
    group = [replace(trajectory, reward=1.0), replace(trajectory, rollout_id="other", reward=0.0)]
    (score, _) = scorer.build(scorer.credit(group)).scores
    assert [call.id for call in trajectory.transitions if score.advantages[call.id] is None] == [title.id]
    given, other = score.advantages[compaction.id], score.advantages[second.id]
    assert given is not None and other is not None and set(given) == set(other) != {0.0}


async def test_rollouts_that_langchains_cache_answers_are_named_by_what_they_are(path: WholePath) -> None:
    questions = {f"cached-{number}": "what is asked four times?" for number in range(4)}
    async with path.workers("graph_agents.py:cached", base_dir=HERE):
        trajectories = await path.run(questions)
    assert sum(len(one.transitions) for one in trajectories) == 1
    group = [replace(one, group_id="g", reward=1.0) for one in trajectories]
    assert explain_silence(group).startswith(
        "3 of 4 rollouts made no model call although others of their group did: the agent's client answers from a cache (LangChain's"
    )
