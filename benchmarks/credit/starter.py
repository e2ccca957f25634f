"""Build a game's starting policy, in seconds: a small transformer with random weights that has seen somebody play.

With `skill` 0 that somebody knows which words are words, no more; else such a share of the words is the best one.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from games import Game, observations

from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy

__all__ = ["build_starter"]

WORDS = r"[A-Za-z]+|[0-9]+|\s|[^\sA-Za-z0-9]"
"""A word is the same token in a prompt and as an answer."""
CONTEXT = 64
SHOWN = 12_000
"""Words: two thirds good ones, so that the weights know what there is to see, then those of `skill`, so that the policy
is no better."""


def build_starter(
    out: Path, game: Game, *, skill: float, shown: int = SHOWN, width: int = 64, layers: int = 2, seed: int = 0
) -> None:
    """Write a transformers folder."""
    rng = random.Random(f"{seed} {game.name}")
    phases = [_demonstrations(game, shown * 2 // 3, 1.0, rng), _demonstrations(game, shown // 3, skill, rng)]
    tokenizer = build_tokenizer(
        [one for phase in phases for one in phase], words=WORDS, common=1, context_length=CONTEXT
    )
    model = build_model(tokenizer, width=width, layers=layers, seed=seed)
    cold_start(model, tokenizer, phases, seed=seed, batch_tokens=1024)
    write_policy(out, model, tokenizer)


def _demonstrations(game: Game, count: int, skill: float, rng: random.Random) -> list[Demonstration]:
    """Of all observations alike; a share of `skill` is what plays well, the others are any words."""
    shown = []
    for observation, (case, state) in itertools.islice(
        itertools.cycle(observations(game, game.cases()).items()), count
    ):
        word = game.best(case, state) if rng.random() < skill else rng.choice(game.sensible(case, state))
        messages = [{"role": "user", "content": observation}, {"role": "assistant", "content": word}]
        shown.append(Demonstration(messages=messages))
    return shown
