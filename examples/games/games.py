"""GEM's games as a task source in one file: a task is a game's name and a seed, a rollout is scored by a replay.

seed ─► Game ─► observation ─► model ─► move ─► Game …     a turn's reward is reported of its call

GEM draws from Python's global `random`, which all rollouts of a process share: while one game waits for its model,
another would move the dice on. So each game has dice of its own, put in the global's place while it draws.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers

from lightningrl import Task, report_reward
from lightningrl.errors import ConfigError

LOCK = threading.Lock()
FETCH = "pip install --no-deps gem-llm==0.1.0"


class Game:
    """A game of GEM: what it shows, and whether it is over."""

    def __init__(self, name, seed):
        self._dice = random.Random(seed).getstate()
        with self._own_dice():
            self._env = make(name)
            shown, info = self._env.reset(seed=seed)
        self.shown, self.is_over = show(shown, info), False

    def move(self, text):
        """Play a move, and return its reward."""
        with self._own_dice():
            shown, reward, terminated, truncated, info = self._env.step(text)
        self.shown, self.is_over = show(shown, info), bool(terminated or truncated)
        return float(reward)

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        with LOCK:
            others = random.getstate()
            random.setstate(self._dice)
            try:
                yield
            finally:
                self._dice = random.getstate()
                random.setstate(others)


class GemGames:
    """Games by `name`, as `gem.make` knows them; `turns`: the most moves of a rollout."""

    requires = frozenset()

    def __init__(self, *, name="game:GuessTheNumber-v0-easy", turns=20):
        self.name, self.turns = name, turns

    def tasks(self, split, /, *, seed, count):
        """Yield seeds, without end. A game of few positions has few games, whatever its seed."""
        Game(self.name, seed)  # a name that there is not, before the first
        for number in numbers() if count is None else range(count):
            chosen = random.Random(f"{split} {seed} {number}").randrange(2**31)
            yield Task(id=f"{split}-{seed}-{number}", input={"game": self.name, "seed": chosen})

    def agent(self, task):
        """Let the model play; its moves are the output."""
        import openai

        client, game, moves = openai.OpenAI(), Game(task["game"], task["seed"]), []
        messages = [{"role": "user", "content": game.shown}]
        while not game.is_over and len(moves) < self.turns:
            reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
            moves.append(reply.choices[0].message.content or "")
            report_reward("game", game.move(moves[-1]), call=reply.id)
            messages += [{"role": "assistant", "content": moves[-1]}, {"role": "user", "content": game.shown}]
        return moves

    def reward(self, task, output, trajectory=None):
        """The sum of the rewards of the moves, played again: what the agent reported is not asked."""
        game, total = Game(task.input["game"], task.input["seed"]), 0.0
        for text in output[: self.turns] if isinstance(output, list) else ():
            if not game.is_over:
                total += game.move(str(text))
        return total


def make(name):
    try:
        import gem
        import gem.envs
    except ImportError as error:
        raise ConfigError(f"the games need gem-llm 0.1 ({error}); install it: {FETCH}") from error
    try:
        return gem.make(name)
    except ValueError as error:
        raise ConfigError(f"GEM has no game {name!r}: {error}; name another one in options.name") from error


def show(shown, info):
    """An observation as a message: some games have their board apart."""
    return "\n".join(part for part in (str(shown), str(info.get("suffix") or "")) if part)
