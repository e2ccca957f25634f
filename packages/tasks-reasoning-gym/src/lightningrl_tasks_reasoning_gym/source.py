"""The task source: a generator asks question `number`, its entry is made again for the reward; an agent of one call.

(split, seed, number) ─► a generator by weight ─► its data set of block number // BLOCK ─► entry number % BLOCK ─► Task
Task ─► the same entry again ─► score_answer(read_answer(output)) in [0, 1]

A task carries no more than how its entry is made again: an entry's own metadata holds solutions.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count as count_from
from typing import TYPE_CHECKING, Any, Final

from lightningrl.errors import ConfigError, describe_raised
from lightningrl.types import Task

if TYPE_CHECKING:
    from lightningrl.protocols import Reward
    from lightningrl.types import Trajectory

__all__ = ["ReasoningGym", "read_answer"]

TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPENED: Final = "<answer>"
logger = logging.getLogger(__name__)

BLOCK: Final = 1_000
"""Entries of one data set of the library, whose size some generators' entries depend on, and bound."""
UNSTEADY: Final = ("isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note")
"""Generators that follow the order of sets of text, which each process has its own of."""
REFUSED: Final[Mapping[str, str]] = {
    "coin_flip": "its check pays 1.0 for the answer 0, whatever was asked",
    "composite": "it is made of other generators, which `names` lists",
    "game_of_life_halting": "its check pays 1.0 for an answer that is nonsense",
    **dict.fromkeys(UNSTEADY, "its tasks differ from process to process, so no run could go on"),
}
"""Generators that teach nothing right, and why."""
WITHOUT_GOLD: Final = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
"""Generators whose entries have no reference answer; their checks judge an answer by itself."""
SYSTEM: Final = (
    "Answer the question. Write your final answer between <answer> and </answer>, and nothing else in there."
)


class ReasoningGym:
    """Questions of reasoning-gym's generators."""

    requires: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        names: Sequence[str] | Mapping[str, float] = (),
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        system: str = SYSTEM,
    ) -> None:
        """Draw from the generator `name` with its `config`, or from several: `names` as a list, or with a weight each,
        and `configs` by name. `system`: the system message of `agent`; empty = none. Raises ConfigError."""
        if (name is None) is not bool(names):
            raise ConfigError("reasoning_gym takes either name, with config, or names, with configs; give one of them")
        weights = names if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        self._weights = dict(weights) if name is None else {name: 1.0}
        self._configs = dict(configs or {}) if name is None else {name: dict(config or {})}
        self._system = system
        if (name is None and config) or (name is not None and configs):
            raise ConfigError("reasoning_gym takes config beside name, and configs by name beside names; rename it")
        if strange := sorted(self._configs.keys() - self._weights.keys()):
            raise ConfigError(f"reasoning_gym has a config of {strange[0]!r}, which is none of names; add it there")
        if bad := [each for each, weight in self._weights.items() if not 0 < weight < math.inf]:
            raise ConfigError(f"reasoning_gym: the weight of {bad[0]!r} is not above 0; leave the generator out")
        if refused := sorted(self._weights.keys() & REFUSED.keys()):
            raise ConfigError(f"generator {refused[0]!r} is refused: {REFUSED[refused[0]]}; take another")
        self._data_set = lru_cache(maxsize=4 * len(self._weights))(self._make_data_set)
        self._entry = lru_cache(maxsize=1024)(self._make_entry)
        self._warned: set[str] = set()

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """Questions without end. Those of other splits and seeds are others, but small generators repeat themselves.
        Raises ConfigError for a generator or a config that reasoning-gym does not have."""
        for name in self._weights:
            self._data_set(name, split, seed, 0)
        for number in count_from() if count is None else range(count):
            lot = random.Random(f"{split} {seed} {number}")  # noqa: S311
            (name,) = lot.choices([*self._weights], [*self._weights.values()])
            entry = self._entry(name, split, seed, number)
            answer = entry["answer"]
            yield Task(
                id=f"{name}-{split}-{seed}-{number}",
                input=str(entry["question"]),
                answer=None if answer is None else str(answer),
                metadata={"generator": name, "split": split, "seed": seed, "number": number},
            )

    @property
    def reward(self) -> Reward:
        """The generator's own check of what `read_answer` finds, in [0, 1]; an answer that it raises on earns 0.0."""
        # imported here, the library is there in each process of rewards; a worker, which asks for none, goes without
        import reasoning_gym  # noqa: F401

        return self._reward

    def _reward(self, task: Task, output: Any, trajectory: Trajectory) -> float:
        if not isinstance(output, str) or not (answer := read_answer(output)):
            return 0.0
        made = task.metadata
        name = made["generator"]
        entry = self._entry(name, made["split"], made["seed"], made["number"])
        data_set = self._data_set(name, made["split"], made["seed"], made["number"] // BLOCK)
        try:
            score = float(data_set.score_answer(answer=answer, entry=copy.deepcopy(entry)))
        except Exception as error:  # noqa: BLE001  a library's check may raise on any answer
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("generator %r: its check raised %s; such answers earn 0", name, describe_raised(error))
            return 0.0
        return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0

    def gold(self, task: Task) -> str | None:
        """The reference answer in its tags; None where the generator has none."""
        return None if task.answer is None else f"<answer>{task.answer}</answer>"

    async def agent(self, question: str) -> str:
        """Ask once, and return what the model wrote."""
        import openai

        system = [{"role": "system", "content": self._system}] if self._system else []
        messages: Any = [*system, {"role": "user", "content": question}]
        async with openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content or ""

    def _make_data_set(self, name: str, split: str, seed: int, block: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no generator {name!r}; it has: {', '.join(sorted(DATASETS))}")
        # the library's seeds that follow each other share entries: entry i of seed s is entry i - 1 of seed s + 1
        digest = hashlib.blake2b(f"{split} {seed} {block}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest) >> 1
        try:
            return reasoning_gym.create_dataset(name, seed=own, size=BLOCK, **self._configs.get(name, {}))
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"generator {name!r} does not take its config: {error or 'an assertion failed'}; mend it"
            ) from error

    def _make_entry(self, name: str, split: str, seed: int, number: int) -> Any:
        return self._data_set(name, split, seed, number // BLOCK)[number % BLOCK]


def read_answer(text: str) -> str:
    """Return the text in the last pair of `<answer>` tags, after the last tag that is not closed where there is no
    pair, else the last line that is not empty. Without white space around it; empty where there is nothing."""
    if tagged := TAGGED.findall(text):
        return str(tagged[-1]).strip()
    if OPENED in text:
        return text.rpartition(OPENED)[2].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
