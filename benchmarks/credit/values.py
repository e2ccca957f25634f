"""What a state is worth, counted out: the model's own probability of each word, over every future.

Q(s, a) = outcome, where a ends the game; else V(s')        V(s) = Σ_a π(a | s) Q(s, a)        A(s, a) = Q(s, a) - V(s)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from games import GAMES, Case, Game, State
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lightningrl.types import Task
    from lightningrl_torch.backend import TorchBackend

__all__ = ["Probabilities", "TrueValues", "count_out", "encode_prompt", "true_values", "word_probabilities"]

Probabilities = NDArray[np.float64]
"""Of each of a game's words, then of all other tokens together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrueValues:
    """Of one case, under one policy."""

    v: Mapping[State, float]
    """V of each state that can be reached."""
    q: Mapping[State, Mapping[str | None, float]]
    """Q of each of its words, and of None, which stands for any other token."""
    policy: Mapping[State, Mapping[str | None, float]]
    """π of the same."""

    def advantage(self, state: State, word: str | None) -> float:
        return self.q[state][word] - self.v[state]


def true_values(backend: TorchBackend, task: Task) -> TrueValues:
    """V, Q and π of every state of a task of `tasks.py`, under the backend's present weights at temperature 1."""
    from games import observations

    game, case = GAMES[task.input["game"]], task.input["case"]
    seen = list(observations(game, [case]))
    policy = dict(zip(seen, word_probabilities(backend, game, seen), strict=True))
    return count_out(game, case, policy.__getitem__)


def count_out(game: Game, case: Case, policy: Callable[[str], Probabilities]) -> TrueValues:
    """V, Q and π of every state of a case; `policy` gives the probabilities at an observation."""
    v: dict[State, float] = {}
    q: dict[State, dict[str | None, float]] = {}
    chosen: dict[State, dict[str | None, float]] = {}
    words = (*game.words, None)

    def value(state: State) -> float:
        if state not in v:
            steps = {word: game.act(case, state, word) for word in words}
            q[state] = {word: step.outcome if step.state is None else value(step.state) for word, step in steps.items()}
            chosen[state] = dict(zip(words, map(float, policy(game.observe(case, state))), strict=True))
            v[state] = sum(chosen[state][word] * q[state][word] for word in words)
        return v[state]

    value(game.start(case))
    return TrueValues(v=v, q=q, policy=chosen)


def word_probabilities(
    backend: TorchBackend, game: Game, observations: Sequence[str], *, is_greedy: bool = False
) -> NDArray[np.float64]:
    """π [observation][word, then all else] of the backend's present weights at temperature 1, or 0 where greedy, in one
    forward. Nothing may be learned meanwhile."""
    import torch

    tokenizer = tokenizer_of(backend.settings.policy)
    words = [_token(tokenizer, word) for word in game.words]
    prompts = [encode_prompt(tokenizer, observation) for observation in observations]
    token_ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padding is on the right, where nothing looks
        token_ids[row, : len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
    model: Any = backend.learner.model
    with torch.inference_mode():
        hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[torch.arange(len(prompts)), ends]).double()
    if is_greedy:
        logits = torch.where(logits == logits.max(-1, keepdim=True).values, 0.0, -torch.inf)
    probabilities = logits.softmax(-1)[:, words].numpy()
    return np.concatenate([probabilities, np.clip(1.0 - probabilities.sum(1, keepdims=True), 0.0, 1.0)], axis=1)


@functools.cache
def tokenizer_of(policy: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a policy's folder."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    return tokenizer  # type: ignore[no-any-return]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, observation: str) -> tuple[int, ...]:
    """What the server renders the agent's call to."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": observation}], tokenize=False, add_generation_prompt=True
    )
    return tuple(tokenizer.encode(str(text), add_special_tokens=False))


def _token(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    (token,) = tokenizer.encode(word, add_special_tokens=False)
    return int(token)
