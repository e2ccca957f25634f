"""Credit by the policy's own likelihoods: cases worked by hand from the papers' equations, and the traps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner, Services, Witness
from lightningrl.recipe import Recipe
from lightningrl.types import Task, Trajectory, TrajectoryGroup
from lightningrl_credit.likelihood import Hindsight, InformationGain
from lightningrl_credit.needs import check_answers
from lightningrl_credit.samples import build_samples
from lightningrl_testing.credit_conformance import CreditConformance, grpo_advantages
from lightningrl_testing.groups import make_group, make_trajectory, make_transition
from lightningrl_testing.scripted_services import ScriptedServices
from lightningrl_training.build import build_credit

Logprobs = Callable[[list[int], list[int]], Sequence[float]]


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def with_answer(group: TrajectoryGroup, answer: Any = "42") -> TrajectoryGroup:
    task = Task(id="t", input={}, answer=answer)
    return replace(group, trajectories=tuple(replace(one, task=task) for one in group.trajectories))


def hear(assigner: Witness, group: TrajectoryGroup, logprobs: Logprobs) -> TrajectoryGroup:
    async def score(one: Trajectory) -> Trajectory:
        return replace(one, evidence=await assigner.score(one, ScriptedServices(logprobs=logprobs, encode=tokens_of)))

    return replace(group, trajectories=tuple(asyncio.run(score(one)) for one in group.trajectories))


def of_calls(assigner: Any, group: TrajectoryGroup) -> list[list[float]]:
    return [[round(float(tokens[0]), 4) for tokens in calls if tokens is not None] for calls in assigner.assign(group)]


def evidence(group: TrajectoryGroup, name: str) -> list[list[float]]:
    return [
        [round(float(value), 4) for value in one.evidence.calls[name]]
        for one in group.trajectories
        if one.evidence is not None
    ]


# ---------------------------------------------------------------------- information gain

PROBABILITIES = {100: [0.1, 0.3, 0.6], 101: [0.1, 0.1, 0.2]}
"""Of the gold answer after each prompt; the first token of a rollout's prompts is its name."""


def by_prompt(tokens: list[int], context: list[int]) -> list[float]:
    """A prompt of make_group ends with 500 + t after call t."""
    turn = sum(500 <= token < 510 for token in context)
    return [math.log(PROBABILITIES[context[0]][turn])] * len(tokens)


def two() -> TrajectoryGroup:
    return with_answer(make_group((None,) * 3, (None,) * 3, rewards=(1.0, 0.0)))


def test_a_gain_is_the_difference_to_the_prompt_before_from_the_empty_history_on_and_the_last_turn_has_none() -> None:
    assigner = InformationGain()
    heard = hear(assigner, two(), by_prompt)
    assert evidence(heard, "gain") == [[0.2, 0.3, 0.0], [0.0, 0.1, 0.0]]
    assert evidence(heard, "answer") == [[0.1, 0.3, 0.6], [0.1, 0.1, 0.2]]
    assert assigner.finish_step([heard], [assigner.assign(heard)]) == {
        "gain": pytest.approx(0.1),
        "answer": pytest.approx(0.6),
    }
    assert assigner.finish_step([], []) == {}


def test_an_answer_that_the_policy_never_says_in_this_form_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Gains of 1e-6 are noise, which the baseline makes as large as the outcome."""
    assigner = InformationGain()
    unsaid = hear(
        assigner,
        two(),
        lambda tokens, context: [math.log(1e-6 * PROBABILITIES[context[0]][len(context) % 3])] * len(tokens),
    )
    for _ in range(2):
        assert assigner.finish_step([unsaid], [assigner.assign(unsaid)])["answer"] < 1e-6
    (warning,) = caplog.messages
    assert "as credit.options.answer = '{answer}' writes it, was nowhere likelier than" in warning
    likely = hear(assigner, two(), by_prompt)
    InformationGain().finish_step([likely], [assigner.assign(likely)])
    assert caplog.messages == [warning]


def test_an_impossible_answer_is_warned_of_too(caplog: pytest.LogCaptureFixture) -> None:
    """Its probability is 0.0 in float32, as if nobody had asked."""
    impossible = hear(InformationGain(), two(), lambda tokens, context: [-500.0] * len(tokens))
    assigner = InformationGain()
    assert 0.0 < assigner.finish_step([impossible], [assigner.assign(impossible)])["answer"] < 1e-30
    assert len(caplog.messages) == 1


def test_where_each_prompt_is_built_anew_the_roles_next_call_follows_if_one_says_so() -> None:
    """Calls of `write` and `check` by turns, with no history between them: write's gains are 0.3 - 0.1 and 0.6 - 0.3,
    check's 0.5 - 0.4."""
    known = {10: 0.1, 11: 0.4, 12: 0.3, 13: 0.5, 14: 0.6}
    calls = [make_transition(f"c{t}", prompt=[10 + t], index=t, agent=("write", "check")[t % 2]) for t in range(5)]
    group = with_answer(TrajectoryGroup(id="g", trajectories=(make_trajectory("r", calls, reward=1.0),)))

    def logprobs(tokens: list[int], context: list[int]) -> list[float]:
        return [math.log(known[context[0]])] * len(tokens)

    assert evidence(hear(InformationGain(), group, logprobs), "gain") == [[0.0] * 5]
    assert evidence(hear(InformationGain(follows="role"), group, logprobs), "gain") == [[0.2, 0.1, 0.3, 0.0, 0.0]]
    with pytest.raises(ConfigError, match="follows 'time' is none of 'history', 'role'"):
        InformationGain(follows="time")  # type: ignore[arg-type]


def test_gains_and_outcome_have_baselines_of_their_own_and_go_on_discounted_by_hand() -> None:
    """γ = 0.5. Turn 1: gains (0.2, 0) less 0.1; turn 2: (0.3, 0.1) less 0.2; outcome (1, 0) less 0.5.
    First rollout: 0.1 + 0.5·0.1 + 0.25·0.5, 0.1 + 0.5·0.5, 0.5."""
    assigner = InformationGain(gamma=0.5, baseline="dr_grpo")
    assert of_calls(assigner, hear(assigner, two(), by_prompt)) == [[0.275, 0.35, 0.5], [-0.275, -0.35, -0.5]]
    over_all = InformationGain(gamma=0.5, baseline="dr_grpo", compared="all")  # all four gains less their mean of 0.15
    assert of_calls(over_all, hear(over_all, two(), by_prompt)) == [[0.25, 0.4, 0.5], [-0.3, -0.3, -0.5]]
    weighed = InformationGain(gamma=0.5, baseline="dr_grpo", turn_weight=2.0)
    assert of_calls(weighed, hear(weighed, two(), by_prompt)) == [[0.425, 0.45, 0.5], [-0.425, -0.45, -0.5]]


def test_gains_go_on_along_branches_and_never_across() -> None:
    """c0 ─► left, right, and left ─► last: γ = 0.5, gains (of branches their mean) c0: 0.2, left: 0.4."""
    calls = [
        make_transition("c0", prompt=[1]),
        make_transition("left", prompt=[2], parent="c0", index=1),
        make_transition("right", prompt=[3], parent="c0", index=2),
        make_transition("last", prompt=[4], parent="left", index=3),
    ]
    chance = {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.6, 9: 0.5}
    other = [make_transition("o", prompt=[9])]
    group = TrajectoryGroup(
        id="g",
        trajectories=(
            make_trajectory("a", calls, reward=0.0, answer="42"),
            make_trajectory("b", other, reward=0.0, answer="42"),
        ),
    )
    assigner = InformationGain(gamma=0.5, baseline="none")
    heard = hear(assigner, group, lambda tokens, context: [math.log(chance[context[0]])])
    assert evidence(heard, "gain")[0] == [0.2, 0.4, 0.0, 0.0]
    assert of_calls(assigner, heard) == [[0.4, 0.4, 0.0, 0.0], [0.0]]


def test_over_all_turns_it_is_the_papers_normalisation() -> None:
    """IGPO's: (r - mean) / std over all gains of the group, the outcome's apart, then discounted sums; γ = 1, here with
    ddof 1 over rollouts: gains (0.2, 0.3, 0, 0.1): variance (0.05² + 0.15² + 0.15² + 0.05²)/2 = 0.025."""
    assigner = InformationGain(compared="all", epsilon=0.0)
    deviation, outcome = math.sqrt(0.025), 0.5 / math.sqrt(0.5)
    first = [0.05 / deviation + 0.15 / deviation + outcome, 0.15 / deviation + outcome, outcome]
    np.testing.assert_allclose(of_calls(assigner, hear(assigner, two(), by_prompt))[0], first, atol=1e-4)


def test_a_probability_is_that_of_a_token_on_average_so_that_long_answers_are_not_unlikely() -> None:
    assigner = InformationGain()

    def likely(tokens: list[int], context: list[int]) -> list[float]:
        return [math.log(0.25), 0.0] if len(context) > 3 else [math.log(0.01), math.log(0.01)]

    calls = [make_transition("c0", prompt=[1]), make_transition("c1", prompt=[1, 4, 5, 6], parent="c0")]
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("r", calls, answer="42"),))
    assert evidence(hear(assigner, group, likely), "gain") == [[0.49, 0.0]], "exp of the mean, not of the sum"


def test_the_outcomes_size_says_nothing_of_the_gains() -> None:
    assigner = InformationGain()
    small, large = two(), with_answer(make_group((None,) * 3, (None,) * 3, rewards=(1000.0, 0.0)))
    assert of_calls(assigner, hear(assigner, small, by_prompt)) == of_calls(assigner, hear(assigner, large, by_prompt))
    equal = with_answer(make_group((None,) * 3, (None,) * 3, rewards=(1.0, 1.0)))
    assert of_calls(InformationGain(baseline="dr_grpo"), hear(assigner, equal, by_prompt))[0] == [0.2, 0.1, 0.0], (
        "gains teach alone"
    )


def test_four_equal_rollouts_teach_nothing_whatever_their_gains() -> None:
    group = with_answer(make_group(*((None,) * 5,) * 4, rewards=(1.0,) * 4))

    def by_turn(tokens: list[int], context: list[int]) -> list[float]:
        return [math.log(0.1 + 0.05 * sum(500 <= token < 510 for token in context) ** 2)] * len(tokens)

    for assigner in (InformationGain(gamma=0.9), InformationGain(gamma=0.9, compared="all")):
        assert {value for calls in of_calls(assigner, hear(assigner, group, by_turn)) for value in calls} == {0.0}


def test_a_history_rendered_anew_goes_on_and_those_beside_it_do_not() -> None:
    """main ─► c1 (a break of c0) ; helper by itself; both children of c1 are what came of it."""
    calls = [
        make_transition("c0", prompt=[1], agent="main"),
        make_transition("helper", prompt=[2], agent="helper", index=1),
        replace(make_transition("c1", prompt=[3], agent="main", index=2), is_break=True),
        make_transition("c2", prompt=[4], agent="main", index=3, parent="c1"),
        make_transition("c3", prompt=[5], agent="main", index=4, parent="c1"),
    ]
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("r", calls, answer="42"),))
    chance = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.4, 5: 0.8}
    heard = hear(InformationGain(), group, lambda tokens, context: [math.log(chance[context[0]])])
    assert evidence(heard, "gain") == [[0.1, 0.0, 0.4, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("answer", "option", "said"),
    [
        ("42", "<answer>{answer}</answer>", "<answer>42</answer>"),
        (42, "{answer}", "42"),
        ({"a": "ü"}, "{answer}", '{"a": "ü"}'),
        ("{answer}", "{answer}!", "{answer}!"),
        (None, lambda task: f"{task.id}?", "t?"),
    ],
)
def test_how_the_gold_answer_becomes_text(answer: Any, option: Any, said: str) -> None:
    heard: list[list[int]] = []

    def listen(tokens: list[int], context: list[int]) -> list[float]:
        heard.append(tokens)
        return [0.0] * len(tokens)

    group = with_answer(make_group((None,) * 2, (None,), rewards=(1.0, 0.0)), answer)
    hear(InformationGain(answer=option), group, listen)
    assert heard == [tokens_of(said)] * 2, "of a rollout of one call nothing is asked"


def test_of_several_right_answers_the_likeliest_counts() -> None:
    chances = {("a", 1): 0.1, ("b", 1): 0.2, ("a", 2): 0.7, ("b", 2): 0.3}

    def logprobs(tokens: list[int], context: list[int]) -> list[float]:
        return [math.log(chances[bytes(tokens).decode(), len(context)])]

    calls = [make_transition("c0", prompt=[1]), make_transition("c1", prompt=[1, 2], parent="c0")]
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("r", calls, answer=["a", "b"]),))
    assert evidence(hear(InformationGain(), group, logprobs), "gain") == [[0.5, 0.0]]


def test_a_task_without_an_answer_is_refused_at_the_start_and_left_out_afterwards() -> None:
    assigner = InformationGain()
    with pytest.raises(
        ConfigError, match=r"'likelihood' needs 'answers', and task 'b' has none; give each training task an `answer`"
    ):
        check_answers("likelihood", assigner.requires, [Task(id="a", input=1, answer=0), Task(id="b", input=1)])
    check_answers("likelihood", InformationGain(answer=lambda task: "x").requires, [Task(id="b", input=1)])
    with pytest.raises(ConfigError, match="task 't' has no answer to be likely"):
        hear(assigner, with_answer(two(), None), by_prompt)
    with pytest.raises(ConfigError, match="'' has no tokens"):
        hear(assigner, with_answer(two(), ""), by_prompt)


# ---------------------------------------------------------------------- hindsight

CHANCES = {0: 0.5, 1: 0.25, 2: 0.75}
"""Of a call's completion in hindsight, by turn."""


def in_hindsight(tokens: list[int], context: list[int]) -> list[float]:
    return [math.log(CHANCES[tokens[0] // 10 % 10])] * len(tokens)


def test_ratios_are_normalised_within_the_rollout_and_bounded_by_hand() -> None:
    """τ = 1: (0.5, 0.25, 0.75) over their mean 0.5: (1, 0.5, 1.5), cut to (1, 0.8, 1.2). A failure is told no
    success."""
    assigner = Hindsight(temperature=1.0)
    assert evidence(hear(assigner, two(), in_hindsight), "ratio") == [[1.0, 0.8, 1.2], [1.0, 1.0, 1.0]]
    wide = Hindsight(temperature=2.0, bounds=(0.0, 9.0))
    roots = [math.sqrt(chance) for chance in CHANCES.values()]
    expected = [round(root / (sum(roots) / 3), 4) for root in roots]
    assert evidence(hear(wide, two(), in_hindsight), "ratio")[0] == pytest.approx(expected, abs=1e-4)


def test_hindsight_is_added_to_the_outcome_and_harms_no_success_by_hand() -> None:
    """Three successes and a failure; one success with ratios (1, 0.8, 1.2), the others 1. Q of turn 2: (0.8, 1, 1, 0),
    mean 0.7; of turn 3: (1.2, 1, 1, 0), mean 0.8. Outcome: 0.25 and -0.75. Of the second term the successes keep what
    is positive."""
    group = with_answer(make_group(*((None,) * 3,) * 4, rewards=(1.0, 1.0, 1.0, 0.0)))

    def of_first(tokens: list[int], context: list[int]) -> list[float]:
        return in_hindsight(tokens, context) if tokens[0] < 2000 else [0.0] * len(tokens)

    assigner = Hindsight(temperature=1.0, baseline="dr_grpo")
    heard = hear(assigner, group, of_first)
    assert of_calls(assigner, heard) == [[0.5, 0.35, 0.65], [0.5, 0.55, 0.45], [0.5, 0.55, 0.45], [-1.5, -1.45, -1.55]]
    half = Hindsight(
        temperature=1.0, baseline="dr_grpo", omega=0.5, gamma=0.5
    )  # normalised, then discounted: ·(0.25, 0.5, 1)
    assert of_calls(half, heard)[0] == [
        round(0.25 + 0.5 * factor * term, 4) for factor, term in ((0.25, 0.25), (0.5, 0.1), (1.0, 0.4))
    ]


def test_negative_hindsight_is_masked_in_a_success_and_stands_in_a_failure() -> None:
    group = with_answer(make_group((None,), (None,), (None,), rewards=(1.0, 3.0, 0.0)))
    assigner = Hindsight(baseline="dr_grpo", omega=1.0)
    heard = hear(assigner, group, in_hindsight)
    outcomes = [1.0 - 4 / 3, 3.0 - 4 / 3, -4 / 3]
    assert of_calls(assigner, heard) == [
        [round(outcomes[0], 4)],
        [round(2 * outcomes[1], 4)],
        [round(2 * outcomes[2], 4)],
    ]


def test_smoothing_takes_a_part_of_the_next_calls_credit() -> None:
    """α = 0.5: Q (1, 0.8, 1.2) becomes (0.9, 1, 1.2), compared with a failure's zeros."""
    assigner = Hindsight(temperature=1.0, baseline="dr_grpo", smoothing=0.5)
    assert of_calls(assigner, hear(assigner, two(), in_hindsight))[0] == [0.95, 1.0, 1.1]


def test_what_is_told_in_hindsight_is_in_no_row_that_is_trained() -> None:
    contexts: list[list[int]] = []

    def listen(tokens: list[int], context: list[int]) -> list[float]:
        contexts.append(context)
        return in_hindsight(tokens, context)

    assigner = Hindsight(hint="It ended so: {output}!")
    group = replace(two(), trajectories=tuple(replace(one, output={"a": "TOLD"}) for one in two().trajectories))
    heard = hear(assigner, group, listen)
    secret = tokens_of('It ended so: {"a": "TOLD"}!')
    prompts = [call.prompt_ids.tolist() for call in group.trajectories[0].transitions]
    assert contexts == [[*secret, *prompt] for prompt in prompts], "before the prompt of each call of the success"
    rows = build_samples([heard], [assigner.assign(heard)])
    plain = build_samples([group], [assigner.assign(heard)])
    assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in plain]
    assert all(
        secret[:3] != row.token_ids[start : start + 3].tolist() for row in rows for start in range(len(row.token_ids))
    )


# ---------------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "prm"}, "method 'prm' is none of 'gain', 'hindsight'"),
        ({"omega": 0.5}, "with method = 'gain' does not read omega; leave it out"),
        ({"method": "hindsight", "answer": "{answer}"}, "with method = 'hindsight' does not read answer"),
        ({"answer": "gold"}, r"answer 'gold' has no \{answer\} in it"),
        ({"compared": "some"}, "compared 'some' is none of 'turn', 'all'"),
        ({"method": "hindsight", "bounds": [1.1, 1.2]}, r"bounds \[1.1, 1.2\] do not hold 1 between them"),
        ({"method": "hindsight", "bounds": [1.0]}, "bounds"),
        ({"method": "hindsight", "temperature": 0.0}, "temperature 0.0 is to be above 0"),
        ({"method": "hindsight", "smoothing": 1.5}, "smoothing 1.5 above 0 and at most 1"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make_scorer(tmp_path, **options)


def make_scorer(folder: Path, **options: Any) -> Any:
    (folder / "gold.py").write_text(
        "def right(task, output, trajectory): ...\ndef say(task): return 'x'\n", encoding="utf-8"
    )
    recipe = {
        "agent": "gold.py:right",
        "tasks": {"train": "gold.py:right"},
        "policy": {"model": "org/model"},
        "rewards": {"right": {"use": "gold.py:right"}},
        "credit": {"use": "likelihood", "options": options},
        "folder": folder,
    }
    return build_credit(Recipe.model_validate(recipe), load_plugins())[1]


def test_a_recipe_says_what_it_needs(tmp_path: Path) -> None:
    assert make_scorer(tmp_path).requires == {"group", "logprobs", "answers"}
    assert make_scorer(tmp_path, answer="gold.py:say").requires == {"group", "logprobs"}
    assert make_scorer(tmp_path, method="hindsight", bounds=[0.5, 2.0], smoothing=0.5, baseline="none").requires == {
        "logprobs"
    }


def test_a_rewarded_rollout_without_evidence_is_a_defect_and_not_a_zero() -> None:
    with pytest.raises(PluginError, match="rollout 'g-0' has a reward and no 'gain'"):
        InformationGain().assign(make_group((1.0,), (0.0,)))


# ---------------------------------------------------------------------- conformance


class _Likely(CreditConformance):
    """A policy that finds all as likely; but in the group of different rewards, by the tokens."""

    def scored_group(self) -> TrajectoryGroup:
        group = with_answer(super().scored_group(), MARK)
        return replace(group, trajectories=tuple(replace(one, output=MARK) for one in group.trajectories))

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return grpo_advantages(rewards)

    def services(self) -> Services:
        def logprobs(tokens: list[int], context: list[int]) -> list[float]:
            is_marked = bytes(MARK, "utf-8") in bytes(token % 256 for token in (*context, *tokens))
            return [-(sum(context) % 7 + sum(tokens) % 5) / 3 if is_marked else -1.0] * len(tokens)

        return ScriptedServices(logprobs=logprobs, encode=tokens_of)


MARK = "by the tokens"


def _answer(task: Task) -> str:
    return str(task.answer)


class TestInformationGain(_Likely):
    def make_assigner(self) -> CreditAssigner:
        return InformationGain(answer=_answer)


class TestInformationGainOverAll(_Likely):
    def make_assigner(self) -> CreditAssigner:
        return InformationGain(answer=_answer, compared="all", gamma=0.9)


class TestHindsight(_Likely):
    def make_assigner(self) -> CreditAssigner:
        return Hindsight()

    @pytest.mark.xfail(
        reason="success in hindsight is a second look at the outcome: it counts up to 1 + ω times", strict=True
    )
    def test_without_turn_rewards_it_is_the_outcome_method(self) -> None:
        super().test_without_turn_rewards_it_is_the_outcome_method()
