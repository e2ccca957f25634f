"""Credit by the policy's own likelihoods under another context: nobody else is asked, one forward pass for each call.

`InformationGain` (IGPO, arXiv 2510.14967): how much likelier a call made the gold answer a*.

    p_t = exp(1/L Σ_j log π(a*_j | h_t, a*_{<j}))   h_t: the prompt of call t; p_1 is that of the empty history  (eq. 2)
    r_t = p_{t+1} - p_t                             for all but the last call of a history                       (eq. 3)
    A_t = Σ_{k ≥ t} γ^{k-t} Â_k                     Â_k = baseline(r_k) before another call, else baseline(R)

`Hindsight` (HCAPO, arXiv 2603.08754): how much likelier a call is once one knows that the rollout succeeded.

    π_t = exp(1/(τ |a_t|) Σ_j log π(a_{t,j} | success, s_t, a_{t,<j}))                                           (eq. 6)
    ρ_t = clip(π_t / mean_k π_k, 0.8, 1.2)          normalised within the rollout                                (eq. 7)
    A_t = baseline(R) + ω · γ^{T-t} · baseline(ρ_t · R)                                                          (eq. 8)
          of the second term nothing negative is taken in a rollout that succeeded ("do no harm", §4.3)

Both compare a call with the same turn of the others (`compared = "turn"`); over all turns (`"all"`: both papers' code)
a turn is good or bad by its position, too. Where a paper discounts before it normalises, we normalise first: of equal
rollouts nothing is left. The numbers are evidence, not a term of the loss: no gradient goes through them, and no token
of the other context is ever trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray
from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.protocols import Services
from lightningrl.sanitize import as_text
from lightningrl.types import Advantages, Evidence, IntArray, Task, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.baselines import Baseline, baseline_advantages, check_baseline, options_of_kind
from lightningrl_credit.evidence import evidence_of, mean_evidence
from lightningrl_credit.rewards.lineages import following
from lightningrl_credit.spread import to_tokens
from lightningrl_credit.turns import TurnReturns, sum_to_go

__all__ = ["Answer", "Compared", "Follows", "Hindsight", "InformationGain", "likelihood"]

Answer = Callable[[Task], str]
Compared = Literal["turn", "all"]
Follows = Literal["history", "role"]
_Bools = NDArray[np.bool_]
_Indices = NDArray[np.intp]
_LONGEST_OUTPUT = 2000
"""Characters of a rollout's output that are told in hindsight."""
_LEAST = float(np.finfo(np.float32).tiny)
"""Probability of an impossible answer, so that it differs from one that nobody asked for."""
_NEVER = 1e-3
"""Probability per token below which the policy never says the answer."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Likelihood:
    """The base of both: two terms, each with a baseline of its own, the outcome's and the turns'."""

    requires: frozenset[str] = field(init=False)
    gamma: InitVar[float] = 1.0
    compared: Compared = "turn"
    baseline: Baseline = "grpo"
    epsilon: float = 1e-6

    def __post_init__(self, gamma: float) -> None:
        check_baseline(self.baseline)
        if self.compared not in get_args(Compared):
            raise ConfigError(f"credit assigner 'likelihood': compared {self.compared!r} is none of 'turn', 'all'")
        self._turns = TurnReturns(gamma=gamma, baseline=self.baseline, epsilon=self.epsilon)
        """Numbers the turns, and discounts along histories."""
        self.requires = frozenset({"logprobs", *(["group"] if self.baseline != "none" else [])})

    def _outcomes(self, rewarded: Sequence[Trajectory]) -> FloatArray:
        returns = np.array([trajectory.reward for trajectory in rewarded], dtype=np.float64)
        return self._normalize(returns, np.arange(len(rewarded)))

    def _places(self, rewarded: Sequence[Trajectory]) -> tuple[list[_Indices], list[FloatArray]]:
        """Turn number of each call, and its γ^{T-t}."""
        channels = [self._turns.channels(trajectory) for trajectory in rewarded]
        turns = [np.zeros(0, dtype=np.intp) if turns.turns is None else turns.turns for _, turns in channels]
        return turns, [outcome.factors for outcome, _ in channels]

    def _compare(
        self, values: Sequence[FloatArray], turns: Sequence[_Indices], counts: Sequence[_Bools]
    ) -> list[FloatArray]:
        """Compare `values[trajectory][call]` with each other; 0.0 where a call does not count."""
        if not values:
            return []
        counted, of_turn = np.concatenate(counts), np.concatenate(turns)
        owners = np.repeat(np.arange(len(values)), [len(some) for some in values])
        flat = np.concatenate(values)
        scores = np.zeros(len(flat))
        for turn in np.unique(of_turn[counted]):
            here = counted & (of_turn == turn)
            scores[here] = self._normalize(flat[here], owners[here])
        if self.compared == "all" and scores.any():  # else they differ by their position alone
            scores[counted] = self._normalize(flat[counted], owners[counted])
        return np.split(scores, np.cumsum([len(some) for some in values])[:-1])

    def _normalize(self, values: FloatArray, owners: _Indices) -> FloatArray:
        numbers = np.unique(owners, return_inverse=True)[1]
        return (
            baseline_advantages(values, numbers, baseline=self.baseline, epsilon=self.epsilon)
            if len(values)
            else values
        )


@dataclass(kw_only=True, eq=False)
class InformationGain(_Likelihood):
    """IGPO: a call is paid by how much likelier it made the gold answer; the last of a history has the outcome. It
    helped on neither of our tasks (docs/explanation/credit/likelihood.md)."""

    answer: str | Answer = "{answer}"
    """The task's answer in the policy's words, where a completion begins: a text with `{answer}` in it or a function of
    the task. Of a list of answers the likeliest counts."""
    follows: Follows = "history"
    """A call's next one goes on with its `history`, or is the `role`'s next one, whatever its prompt."""
    turn_weight: float = 1.0
    """Factor of the gains' advantages."""

    def __post_init__(self, gamma: float) -> None:
        super().__post_init__(gamma)
        if isinstance(self.answer, str) and "{answer}" not in self.answer:
            raise ConfigError(
                f"credit assigner 'likelihood': answer {self.answer!r} has no {{answer}} in it; "
                "write it where the answer stands"
            )
        if self.follows not in get_args(Follows):
            raise ConfigError(f"credit assigner 'likelihood': follows {self.follows!r} is none of 'history', 'role'")
        self._has_warned = False
        if isinstance(self.answer, str):
            self.requires |= {"answers"}

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Find `gain` of each call, 0.0 for the last of a history, and `answer`, the right answer's probability in the
        call's place, 0.0 where nobody asked."""
        calls = trajectory.transitions
        following = _following_calls(calls, self.follows)
        needed = sorted({t for t, later in enumerate(following) if later} | {t for later in following for t in later})
        if not needed:  # nothing is asked of a rollout of one call
            return Evidence(calls={name: np.zeros(len(calls), np.float32) for name in ("gain", "answer")})
        answers = [await _encode(text, calls, ask) for text in self._texts(trajectory.task)]

        async def probability_before(call: Transition) -> float:
            return max(
                [await _probability(tokens[call.policy], call.prompt_ids, call.policy, ask) for tokens in answers]
            )

        probabilities = await asyncio.gather(*(probability_before(calls[t]) for t in needed))
        probability = dict(zip(needed, probabilities, strict=True))
        gains = [
            float(np.mean([probability[k] for k in later]) - probability[t]) if later else 0.0
            for t, later in enumerate(following)
        ]
        before = [max(probability[t], _LEAST) if t in probability else 0.0 for t in range(len(calls))]
        return Evidence(calls={"gain": np.array(gains, np.float32), "answer": np.array(before, np.float32)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
        outcomes = self._outcomes(rewarded)
        turns, discounts = self._places(rewarded)
        next_calls = [_following_calls(trajectory.transitions, self.follows) for trajectory in rewarded]
        has_next = [np.array([bool(later) for later in by_call], dtype=np.bool_) for by_call in next_calls]
        gains = self._compare([evidence_of(one, "gain") for one in rewarded], turns, has_next)
        gamma = self._turns.gamma
        scores = (
            self.turn_weight * sum_to_go(gain, following(rollout.transitions), gamma) + discount * outcome
            for rollout, gain, discount, outcome in zip(rewarded, gains, discounts, outcomes, strict=True)
        )
        return to_tokens(group, np.concatenate([np.zeros(0), *scores]))

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /) -> dict[str, float]:
        likeliest = self._likeliest(groups)
        if likeliest is not None and likeliest < _NEVER and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "credit 'likelihood': the right answer, as credit.options.answer = %r writes it, was nowhere likelier "
                "than %.1g per token, so that the gains are noise: the policy does not say answers in this form, or "
                "not yet; write it as the agent's last call does, for example '<answer>{answer}</answer>'",
                self.answer,
                likeliest,
            )
        metrics = mean_evidence(groups, "gain")
        return metrics if likeliest is None else {**metrics, "answer": likeliest}

    def _likeliest(self, groups: Sequence[TrajectoryGroup]) -> float | None:
        """The greatest probability of a gold answer in a step; None where nobody was asked."""
        asked = [
            trajectory.evidence.calls
            for group in groups
            for trajectory in group.trajectories
            if trajectory.evidence is not None
        ]
        return max((float(each["answer"].max(initial=0.0)) for each in asked if "answer" in each), default=0.0) or None

    def _texts(self, task: Task) -> list[str]:
        if callable(self.answer):
            return [self.answer(task)]
        if task.answer is None or task.answer == []:
            raise ConfigError(
                f"task {task.id!r} has no answer to be likely; give each task one, or take another assigner"
            )
        answers: list[Any] = task.answer if isinstance(task.answer, list) else [task.answer]
        return [self.answer.replace("{answer}", as_text(answer)) for answer in answers]


@dataclass(kw_only=True, eq=False)
class Hindsight(_Likelihood):
    """HCAPO: of a rollout that succeeded, calls that its success makes likelier have more of the outcome.

    `omega`, `temperature` (τ) and `bounds` of ρ are the paper's; so is a `smoothing` α of 0.5: Q_t ← α Q_t + (1 - α)
    Q_{t+1} (appendix A; 1.0 = none).
    """

    hint: str = "This is how the task below was solved in the end: {output}\n\n"
    """Stands before the call's prompt, with the rollout's output for `{output}`."""
    omega: float = 1.0
    temperature: float = 5.0
    bounds: Sequence[float] = (0.8, 1.2)
    smoothing: float = 1.0
    success: float = 0.0
    """A rollout with a reward above it succeeded."""

    def __post_init__(self, gamma: float) -> None:
        super().__post_init__(gamma)
        low, high = self.bounds if len(self.bounds) == 2 else (1.0, 0.0)
        if not 0.0 <= low <= 1.0 <= high:
            raise ConfigError(
                f"credit assigner 'likelihood': bounds {self.bounds!r} do not hold 1 between them; try [0.8, 1.2]"
            )
        if self.temperature <= 0.0 or not 0.0 < self.smoothing <= 1.0:
            raise ConfigError(
                f"credit assigner 'likelihood': temperature {self.temperature!r} is to be above 0, smoothing "
                f"{self.smoothing!r} above 0 and at most 1; try 5.0 and 0.5"
            )

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Find `ratio`, ρ of each call; 1.0 throughout where the rollout did not succeed."""
        calls = trajectory.transitions
        if not self._succeeded(trajectory):
            return Evidence(calls={"ratio": np.ones(len(calls), np.float32)})
        output = as_text(trajectory.output)
        success = await _encode(self.hint.replace("{output}", output[:_LONGEST_OUTPUT]), calls, ask)
        contexts = [np.concatenate((success[call.policy], call.prompt_ids)) for call in calls]
        asked = (
            _probability(call.completion_ids, context, call.policy, ask)
            for call, context in zip(calls, contexts, strict=True)
        )
        probabilities = np.array(await asyncio.gather(*asked)) ** (1.0 / self.temperature)
        low, high = self.bounds
        ratios = np.clip(probabilities / probabilities.mean(), low, high)
        return Evidence(calls={"ratio": ratios.astype(np.float32)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
        outcomes = self._outcomes(rewarded)
        turns, discounts = self._places(rewarded)
        everywhere = [np.ones(len(one.transitions), dtype=np.bool_) for one in rewarded]
        micro = self._compare([self._values(one) for one in rewarded], turns, everywhere)
        harmless = [
            np.maximum(term, 0.0) if self._succeeded(trajectory) else term
            for trajectory, term in zip(rewarded, micro, strict=True)
        ]
        scores = (
            outcome + self.omega * discount * term
            for discount, term, outcome in zip(discounts, harmless, outcomes, strict=True)
        )
        return to_tokens(group, np.concatenate([np.zeros(0), *scores]))

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /) -> dict[str, float]:
        return mean_evidence(groups, "ratio")

    def _values(self, trajectory: Trajectory) -> FloatArray:
        """Q = ρ · R of each call, smoothed with the next one's."""
        values = evidence_of(trajectory, "ratio") * float(trajectory.reward or 0.0)
        following = _following_calls(trajectory.transitions)
        after = np.array(
            [np.mean(values[later]) if later else value for value, later in zip(values, following, strict=True)]
        )
        return self.smoothing * values + (1.0 - self.smoothing) * after if len(values) else values

    def _succeeded(self, trajectory: Trajectory) -> bool:
        return trajectory.reward is not None and trajectory.reward > self.success


async def _encode(text: str, calls: Sequence[Transition], ask: Services) -> dict[str, IntArray]:
    """Tokens of the text, by policy. Raises ConfigError for a text without tokens."""
    tokens = {
        policy: np.array(await ask.encode(text, policy=policy), np.int32)
        for policy in sorted({call.policy for call in calls})
    }
    if not all(map(len, tokens.values())):
        raise ConfigError(f"{text!r} has no tokens; give the answer, or `hint`, some text")
    return tokens


async def _probability(tokens: IntArray, context: IntArray, policy: str, ask: Services) -> float:
    """Probability per token of the tokens after the context: exp of their mean log-prob."""
    return float(np.exp(np.mean(await ask.logprobs(tokens, context, policy=policy), dtype=np.float64)))


def _following_calls(transitions: Sequence[Transition], follows: Follows = "history") -> list[list[int]]:
    """Numbers of the calls that go on from each call; none for the last of a history.

    A call goes on from its parent, whose tokens its prompt begins with. Without one it goes on from the last call of
    its role and policy: after a break (only its messages begin alike), and with `role` in any case.
    """
    position = {call.id: t for t, call in enumerate(transitions)}
    latest: dict[tuple[str | None, str], int] = {}
    following: list[list[int]] = [[] for _ in transitions]
    for t, call in enumerate(transitions):
        before = position.get(
            call.parent_id or "", latest.get((call.agent, call.policy)) if call.is_break or follows == "role" else None
        )
        if before is not None and before < t:
            following[before].append(t)
        latest[call.agent, call.policy] = t
    return following


def likelihood(
    *,
    method: Literal["gain", "hindsight"] = "gain",
    answer: Answer | str | None = None,
    follows: Follows | None = None,
    turn_weight: float | None = None,
    hint: str | None = None,
    omega: float | None = None,
    temperature: float | None = None,
    bounds: Sequence[float] | None = None,
    smoothing: float | None = None,
    success: float | None = None,
    gamma: float = 1.0,
    compared: Compared = "turn",
    baseline: Baseline = "grpo",
    epsilon: float = 1e-6,
    folder: Path | str = ".",
) -> InformationGain | Hindsight:
    """Build the assigner that a recipe calls `likelihood`. Raises ConfigError for options of the other method."""
    if isinstance(answer, str) and answer.partition(":")[0].endswith(".py"):
        answer = load_callable(answer, folder)
    of_gain = {"answer": answer, "follows": follows, "turn_weight": turn_weight}
    of_hindsight: dict[str, Any] = {"hint": hint, "omega": omega, "temperature": temperature}
    of_hindsight |= {"bounds": bounds, "smoothing": smoothing, "success": success}
    shared: dict[str, Any] = {"gamma": gamma, "compared": compared, "baseline": baseline, "epsilon": epsilon}
    options = options_of_kind("likelihood", "method", method, {"gain": of_gain, "hindsight": of_hindsight})
    return InformationGain(**options, **shared) if method == "gain" else Hindsight(**options, **shared)
