"""States: calls of a task's rollouts are compared with those that were in the same state (GiGPO, arXiv 2505.10978).

    A_{i,t} = A^E_i + ω · A^S_{i,t}
    A^E_i     = baseline({R_j})_i                         over the group's rollouts, each of them once   (eq. 3)
    A^S_{i,t} = baseline({γ^{T_j - k} R_j : s_{j,k} = s_{i,t}}) + G_{i,t} - mean({G_{j,k} : s_{j,k} = s_{i,t}})
                                                          over the calls in the state, each of them once (eq. 5 to 7)
    G_{i,t}   = Σ_{k ≥ t} γ^{k-t} r_{i,k}                 turn rewards, at their size: not divided by their deviation

A state that fewer than two rollouts were in says nothing: its calls have A^S = 0, not their return. So has a group
whose rollouts all earned the same, however long they took. A state that every rollout was in, as at the first call,
says of the outcome what A^E says, and would count it twice: there A^S is of turn rewards alone, unless λ < 1 or A^E has
no weight. With γ < 1 a state is worth more to those who had fewer calls to go: that is γ's taste for short rollouts.

| option        | is                                                                                                |
|---------------|---------------------------------------------------------------------------------------------------|
| `shrinkage` κ | ECPO, arXiv 2606.05885: m_{s,u} = (n_{s,u} Ḡ_{s,u} + κ μ_s) / (n_{s,u} + κ); a call's A^S is that |
|               | of its action, (m - μ_s) / σ_s                                                                    |
| `gate` τ      | ECPO: A^S · tanh(n_s / τ) · B_s / (B_s + W_s), the variance between and within actions            |
| `lam` λ       | GAGPO, arXiv 2605.13217: G_t = r_t + γ[(1 - λ) V(s_{t+1}) + λ G_{t+1}], V: a state's mean         |

The paper adds turn rewards to the discounted outcome before it normalises.
ECPO's formulas are from two summaries of the paper, whose own text was not to be had: that its advantages are divided
by the deviation of the state's returns, and that an action is the tools called with their arguments (else the
completion), are ours. λ is derived from GAGPO's δ as it is quoted elsewhere, not from the paper; in a branched history
it goes by the first call that follows.

A state key says which calls of a task's rollouts faced the same decision. The state after a call is the next call's.

| key             | two calls are in the same state where                                                       |
|-----------------|---------------------------------------------------------------------------------------------|
| `"prompt"`      | the policy saw the same prompt, token for token                                             |
| `"observation"` | their prompts add the same tokens to those of the call they continue (at first: all tokens) |
| `"tool_result"` | the last tool results were the same, less what `normalize` strips, and as many calls ago    |
| `"file.py:key"` | the user's function, called with the trajectory, returns equal hashable values for them     |

A transition has its prompt's tokens and not its text, so only results of tools can be rid of timestamps and ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, are_equal
from lightningrl.errors import ConfigError, PluginError
from lightningrl.loading import is_reference, load_callable
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup
from lightningrl_credit.baselines import (
    Baseline,
    IdenticalAssignment,
    baseline_advantages,
    call_advantages,
    check_gamma,
    to_tokens,
    undivided,
)
from lightningrl_credit.rewards.lineages import Joins, following
from lightningrl_credit.rewards.tools import tools_of_calls
from lightningrl_credit.turns import TurnReturns, turn_rewards

__all__ = ["KEYS", "StateBaseline", "StateGroups", "StateKey", "find_key", "normalize", "state_keys"]

StateBaseline = Literal["grpo", "dr_grpo", "rloo"]
StateKey = Callable[[Trajectory], Sequence[Hashable]]
"""Gives each call of a trajectory a value that names its state."""
_Indices = NDArray[np.intp]
MOST_COMPARED = 512


@dataclass(kw_only=True, eq=False)
class StateGroups(CreditAssigner):
    """GiGPO, with the options of its successors.

    `key`: one of `KEYS`, or a function; a key's file is looked for in `folder`. `gamma` and `omega` are 0.95 and
    1 in 2505.10978. `episode` weighs A^E. `shrinkage` is 2 in 2606.05885, 0 = none; `gate` None = none. `weights`
    weighs turn rewards by name. `baseline` is the outcome's, in A^E and in A^S; that of turn rewards is the same, less
    its division.
    """

    requires: frozenset[str] = field(init=False, default=frozenset({"group", "state_key"}))
    key: str | StateKey = "prompt"
    gamma: float = 0.95
    omega: float = 1.0
    episode: float = 1.0
    shrinkage: float = 0.0
    gate: float | None = None
    lam: float = 1.0
    weights: InitVar[Mapping[str, float] | None] = None
    baseline: StateBaseline = "grpo"
    epsilon: float = 1e-6
    folder: InitVar[Path | str] = "."

    def __post_init__(self, weights: Mapping[str, float] | None, folder: Path | str) -> None:
        check_gamma("gamma", self.gamma)
        check_gamma("lam", self.lam)
        if self.baseline not in get_args(StateBaseline):
            kinds = ", ".join(get_args(StateBaseline))
            raise ConfigError(f"states cannot be compared by baseline {self.baseline!r}; choose {kinds}")
        if self.shrinkage < 0.0:
            raise ConfigError(f"shrinkage is {self.shrinkage!r}; it is 0 or more")
        if self.gate is not None and self.gate <= 0.0:
            raise ConfigError(f"gate is {self.gate!r}; it is a number of calls above 0, or left out")
        self.joins: Joins = "sum" if self.lam == 1.0 else "first"
        self.key = self._key = find_key(self.key, folder)
        self._outcome = IdenticalAssignment(baseline=self.baseline, epsilon=self.epsilon)
        self._turns = TurnReturns(gamma=self.gamma, weights=weights)
        self._compared: dict[int, tuple[TrajectoryGroup, FloatArray, NDArray[np.bool_]]] = {}
        """Results for the groups that `finish_step` has yet to see, by `id`, so that they are computed once."""

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return self._sum(group, call_advantages(group, self._outcome))

    def assign_by_role(self, group: TrajectoryGroup) -> Advantages:
        """Compare the outcome within each role's calls; a state is always one role's."""
        return self._sum(group, call_advantages(group, self._outcome, set_of=lambda call: call.agent))

    def _sum(self, group: TrajectoryGroup, outcome: FloatArray) -> Advantages:
        return to_tokens(group, self.episode * outcome + self.omega * self._steps(group)[0])

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        """Metrics: `anchor_hit_rate`, the share of trained calls whose state some other rollouts were in, and not all,
        and `zero_step_credit`, the share of trained tokens that have no credit from their state."""
        hits, tokens, zeros = [], [], []
        for group, by_trajectory in zip(groups, advantages, strict=True):
            step, is_hit = self._steps(group)
            calls = [
                (call, credit)
                for trajectory, by_call in zip(group.trajectories, by_trajectory, strict=True)
                if trajectory.reward is not None
                for call, credit in zip(trajectory.transitions, by_call, strict=True)
            ]
            is_trained = np.array([credit is not None and call.trainable for call, credit in calls], dtype=np.bool_)
            lengths = np.array([len(call.completion_ids) for call, _ in calls], dtype=np.intp)
            hits.append(is_hit[is_trained])
            tokens.append(lengths[is_trained].sum())
            zeros.append(lengths[is_trained & (step == 0.0)].sum())
        self._compared.clear()
        hit = np.concatenate([np.zeros(0, np.bool_), *hits])
        if not hit.size:
            return {}
        return {"anchor_hit_rate": float(hit.mean()), "zero_step_credit": float(sum(zeros) / sum(tokens))}

    def _steps(self, group: TrajectoryGroup) -> tuple[FloatArray, NDArray[np.bool_]]:
        result = self._compared.get(id(group))
        if result is None:
            if len(self._compared) >= MOST_COMPARED:
                self._compared.clear()
            result = self._compared[id(group)] = (group, *self._compare_states(group))
        return result[1:]

    def _compare_states(self, group: TrajectoryGroup) -> tuple[FloatArray, NDArray[np.bool_]]:
        """A^S of each call of the rewarded trajectories, and True where its state compares some of them, not all."""
        rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
        owners = np.repeat(np.arange(len(rewarded)), [len(trajectory.transitions) for trajectory in rewarded])
        is_hit = np.zeros(len(owners), dtype=np.bool_)
        if not len(owners):
            return np.zeros(0), is_hit
        states = self._states(rewarded, owners)
        apart = [calls for calls in states if len(np.unique(owners[calls])) < len(rewarded)]
        for calls in apart:
            is_hit[calls] = True
        is_said = self.episode != 0.0 and self.lam == 1.0  # what all compare is A^E once more
        scores = np.zeros(len(owners))
        actions = (
            [action for trajectory in rewarded for action in _actions(trajectory)]
            if self.shrinkage or self.gate
            else None
        )
        if not are_equal(np.array([trajectory.reward for trajectory in rewarded], dtype=np.float64)):
            outcomes = self._returns(rewarded, states, is_outcome=True)
            scores += self._compare(outcomes, apart if is_said else states, actions, self.baseline)
        turns = [turn_rewards(trajectory.transitions, self._turns.weights) for trajectory in rewarded]
        if any(map(np.any, turns)) and not all(np.array_equal(rewards, turns[0]) for rewards in turns[1:]):
            returns = self._returns(rewarded, states, is_outcome=False)
            scores += self._compare(returns, states, actions, undivided(self.baseline))
        return scores, is_hit

    def _compare(
        self,
        returns: FloatArray,
        states: Sequence[_Indices],
        actions: Sequence[Hashable] | None,
        baseline: Baseline,
    ) -> FloatArray:
        """Credit of each call in its state."""
        scores = np.zeros(len(returns))
        for calls in states:
            acted = None if actions is None else [actions[n] for n in calls]
            scores[calls] = self._credit(returns[calls], acted, baseline)
        return scores

    def _states(self, rewarded: Sequence[Trajectory], owners: _Indices) -> list[_Indices]:
        """Calls of each state that two rollouts were in."""
        places = [
            (call.agent, call.policy, key)
            for trajectory in rewarded
            for call, key in zip(trajectory.transitions, state_keys(trajectory, self._key), strict=True)
        ]
        members: dict[Hashable, list[int]] = {}
        for number, place in enumerate(places):
            members.setdefault(place, []).append(number)
        return [np.array(calls) for calls in members.values() if len({int(owners[n]) for n in calls}) > 1]

    def _returns(self, rewarded: Sequence[Trajectory], states: Sequence[_Indices], *, is_outcome: bool) -> FloatArray:
        """Return of each call: what comes to it of the outcome, or of turn rewards."""
        channels = [self._turns.channels(trajectory)[0 if is_outcome else 1] for trajectory in rewarded]
        returns = np.concatenate([channel.factors * channel.returns for channel in channels])
        if self.lam == 1.0:
            return returns
        values = returns.copy()  # V(s), of a state that one rollout alone was in its own return
        for calls in states:
            values[calls] = returns[calls].mean()
        start = 0
        for trajectory in rewarded:
            made = trajectory.transitions
            rewards = np.zeros(len(made)) if is_outcome else turn_rewards(made, self._turns.weights)
            for t, later in reversed(list(enumerate(following(trajectory.transitions)))):
                if len(later) > 1:
                    after = start + later[1]
                    bootstrap = (1.0 - self.lam) * values[after] + self.lam * returns[after]
                    returns[start + t] = rewards[t] + self.gamma * bootstrap
            start += len(trajectory.transitions)
        return returns

    def _credit(self, returns: FloatArray, actions: Sequence[Hashable] | None, baseline: Baseline) -> FloatArray:
        """A^S of the calls of one state.

        Four calls with returns 1, 0, 1, 0 by the actions a, a, b, c; with `dr_grpo` their credit is ±0.5:

            actions     numbers [0 0 1 2], counts [2 1 1], means [0 0.5 -0.5]
            gate        between = 2·0² + 1·0.5² + 1·0.5² = 0.5, within = 0.5² + 0.5² = 0.5: trust = tanh(4 / τ) · 0.5
            shrinkage   κ = 1: a 0·2/3 = 0, b 0.5·1/2 = 0.25, c -0.25: the two calls of a differ by chance
        """
        credit = baseline_advantages(returns, np.arange(len(returns)), baseline=baseline, epsilon=self.epsilon)
        if actions is None or not credit.any():
            return credit
        numbers: dict[Hashable, int] = {}
        action = np.array([numbers.setdefault(name, len(numbers)) for name in actions], dtype=np.intp)
        counts = np.bincount(action)
        means = np.bincount(action, weights=credit) / counts
        if self.gate is not None:
            between = float((counts * means**2).sum())
            within = float(((credit - means[action]) ** 2).sum())
            trust = float(np.tanh(len(returns) / self.gate)) * between / (between + within)
        else:
            trust = 1.0
        if self.shrinkage:  # (n Ḡ + κ μ) / (n + κ) - μ  =  (Ḡ - μ) n / (n + κ)
            credit = (means * counts / (counts + self.shrinkage))[action]
        return trust * credit


def _actions(trajectory: Trajectory) -> list[Hashable]:
    """Action of each call: the tools that it called, with their arguments, or else its completion."""
    return [
        tuple(sorted((tool.name, normalize(tool.arguments)) for tool in tools)) or call.completion_ids.tobytes()
        for call, tools in zip(trajectory.transitions, tools_of_calls(trajectory), strict=True)
    ]


def by_prompt(trajectory: Trajectory) -> list[Hashable]:
    return [call.prompt_ids.tobytes() for call in trajectory.transitions]


def by_observation(trajectory: Trajectory) -> list[Hashable]:
    seen = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in trajectory.transitions}
    return [call.prompt_ids[seen.get(call.parent_id or "", 0) :].tobytes() for call in trajectory.transitions]


def by_tool_result(trajectory: Trajectory) -> list[Hashable]:
    keys: list[Hashable] = []
    last: tuple[tuple[str, str], ...] = ()
    since = 0
    for tools in tools_of_calls(trajectory):
        keys.append((last, since))
        since += 1
        if tools:
            last, since = tuple(sorted((tool.name, normalize(tool.result)) for tool in tools)), 0
    return keys


KEYS: Mapping[str, StateKey] = {"prompt": by_prompt, "observation": by_observation, "tool_result": by_tool_result}


def find_key(key: str | StateKey, folder: Path | str = ".") -> StateKey:
    """Find a key by its name, a user's by `"file.py:name"`, or take the function itself. Raises ConfigError."""
    if callable(key):
        return key
    if isinstance(key, str) and is_reference(key):
        return load_callable(key, folder)
    if key not in KEYS:
        raise ConfigError(
            f"no state key named {key!r}; there are: {', '.join(KEYS)}, or your own function as 'file.py:name'"
        )
    return KEYS[key]


def state_keys(trajectory: Trajectory, key: StateKey) -> Sequence[Hashable]:
    """State key of each call. Raises PluginError where they are too few, too many, or cannot be compared."""
    keys: Any = key(trajectory)
    name, calls = getattr(key, "__name__", type(key).__name__), len(trajectory.transitions)
    of = f"rollout {trajectory.rollout_id!r}"
    if not isinstance(keys, list | tuple):
        raise PluginError(
            f"state key {name!r} returned {type(keys).__name__} for {of}; return a list with one key for each call"
        )
    if len(keys) != calls:
        raise PluginError(
            f"state key {name!r} returned {len(keys)} keys for {of} with {calls} calls; return one for each"
        )
    for number, value in enumerate(keys):
        try:
            hash(value)
        except TypeError:
            raise PluginError(
                f"state key {name!r} returned a {type(value).__name__} for call {number} of {of}, which is not "
                "hashable; return a text, a number or a tuple of them"
            ) from None
    return keys


# Each starts with a class of characters, by which `re` skips the others quickly; `(?<! \w. )`: a word begins there.
_DIGITS = re.compile(
    r"""[0-9] (?<! \w. ) (?:
          [0-9]{3}-[0-9]{2}-[0-9]{2}                                            # 2026-11-25T18:04:05.123+01:00
              (?: [T\ ][0-9]{2}:[0-9]{2} (?: :[0-9]{2} (?: [.,][0-9]+ )? )? (?: Z | [+-][0-9]{2}:?[0-9]{2} )? )?
        | [0-9]?:[0-9]{2}:[0-9]{2} (?: [.,][0-9]+ )? \b                         # 18:04:05.123
        | (?<= 1 ) [0-9]{9} (?: [0-9]{3} | \.[0-9]+ )? \b                      # (milli)seconds since 1970
        | [0-9]* (?: \.[0-9]+ )? \ ? (?: ms | milliseconds? | s | secs? | seconds? ) \b      # 12.3 ms
        | (?: (?<= [sS]tep[\ :=\#]. ) | (?<= [tT]urn[\ :=\#]. ) | (?<= [rR]ound[\ :=\#]. )
            | (?<= [sS]tep[:\ ][\ \#]. ) | (?<= [tT]urn[:\ ][\ \#]. ) | (?<= [rR]ound[:\ ][\ \#]. )
            | (?<= ttempt[\ :=\#]. ) | (?<= ttempt[:\ ][\ \#]. ) | (?<= teration[\ :=\#]. ) | (?<= [tT]ry[\ :=\#]. )
          ) [0-9]* (?: \ ? (?: / | of ) \ ? [0-9]+ )?                          # the numbers of step 3 of 10
    )""",
    re.VERBOSE,
)
_HEX = re.compile(
    r"""[0-9a-fA-F] (?<! \w. ) (?:
          (?<= 0 ) x[0-9a-fA-F]+                                                                # an address
        | (?= [0-9a-fA-F]{7} ) (?:
              [0-9a-fA-F]{7}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}       # a UUID
            | (?: (?<= [0-9] ) (?= [0-9]*[a-fA-F] ) | (?<= [a-fA-F] ) (?= [a-fA-F]*[0-9] ) )
              [0-9a-fA-F]{11,}                                                                  # a hash
        )
    ) \b""",
    re.VERBOSE,
)
_SHORTEST_HASH = 12
_ID_PREFIXES = ("call_", "chatcmpl-", "toolu_", "run_", "req_", "msg_", "id_")
_IDS = re.compile(rf"\b(?:{'|'.join(_ID_PREFIXES)})(?=\w*[0-9])\w{{6,}}")  # call_9sK2mQ4x


def normalize(text: str) -> str:
    """Strip from a text all that changes from run to run while the state stays.

    Dates and times, durations in seconds, UUIDs, hashes, addresses and call ids, numbers of steps, turns, rounds,
    tries, attempts and iterations; runs of white space are one space.
    """
    words = text.split()
    text = _DIGITS.sub("", " ".join(words))
    longest = max(map(len, words), default=0)
    if longest >= _SHORTEST_HASH or "0x" in text:
        text = _HEX.sub("", text)
    if any(prefix in text for prefix in _ID_PREFIXES):
        text = _IDS.sub("", text)
    return " ".join(text.split())
