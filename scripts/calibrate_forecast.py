"""Train many small policies and fit the forecast of `lightningrl forecast` to what became of them.

    python scripts/calibrate_forecast.py train FOLDER     a JSON line per run in FOLDER/runs.jsonl; goes on where it was
    python scripts/calibrate_forecast.py fit FOLDER       writes packages/training/…/forecast/calibration.json
    python scripts/calibrate_forecast.py show             what the committed file says of itself, family by family

Tasks are drawn from generators of reasoning-gym; policies are made here, in seconds each: random weights (`raw`), the
shape of answers without their sense (`shape`), right answers among wrong ones (`some`, `good`). A few runs are of the
examples and of SmolLM2-135M-Instruct. Runs of the small
policies go through engine, credit and learner in this process; the examples through `lightningrl train`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lightningrl.backends import GenerateRequest
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome as RolloutOutcome
from lightningrl.types import Task, Trajectory, Transition
from lightningrl_client.recipe_file import load_recipe
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_training.build import build_backends, build_credit
from lightningrl_training.forecast.evidence import Evidence, gather
from lightningrl_training.forecast.history import spearman
from lightningrl_training.forecast.movement import at_full_rate, measure_moved
from lightningrl_training.forecast.prediction import CALIBRATION, Calibration, features, predict
from lightningrl_training.forecast.record import Outcome, measure_outcome

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
POLICIES: dict[str, tuple[int, float]] = {
    "raw": (0, 0.0),
    "shape": (1000, 0.0),
    "some": (3000, 0.4),
    "good": (4000, 0.7),
}
"""Demonstrations, and the share of them that is right; the others have another task's answer."""
RATES = ((1e-3, 3e-4, 3e-5), (1e-2, 3e-3, 1e-3))
"""Learning rates of the first round, and those of all others."""
STEPS = (8, 16)
PER_GENERATOR = 6
RIDGE = 5.0
WIDTH = (0.05, 0.3)
"""Width of an interval before it is calibrated: least, and by the spread of rewards within groups."""
TARGET = ROOT / "packages/training/src/lightningrl_training/forecast" / CALIBRATION
COMMAND = "python scripts/calibrate_forecast.py train FOLDER; python scripts/calibrate_forecast.py fit FOLDER"
TASKS = 600
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
    recipe: str
    policy: str
    settings: dict[str, Any]


def plan() -> Iterator[Run]:
    """All runs, in rounds over the families, so that any beginning of them is balanced."""
    for number in range(PER_GENERATOR):
        for family in GENERATORS:
            lot = random.Random(f"{family} {number}")
            policy = lot.choices([*POLICIES], [1, 3, 5, 2])[0]
            rate, steps = lot.choices(RATES[min(number, 1)], [3, 4, 2])[0], lot.choice(STEPS)
            yield Run(
                name=f"{family}-{number}",
                family=family,
                recipe="recipe.toml",
                policy=policy,
                settings={"learner.learning_rate": rate, "loop.steps": steps, "loop.seed": number},
            )
    yield from _plan_examples()


def _plan_examples() -> Iterator[Run]:
    small = {"loop.tasks_per_step": 8, "loop.group_size": 8, "validation.every": 0}
    sql, tools, smol = "examples/text_to_sql", "examples/math_tools", "examples/calculator_smollm2"
    gym, words = f"{smol}/reasoning_gym.toml", f"{smol}/word_problems.toml"
    for name, recipe, steps, rate in (
        ("text_to_sql-0", sql, 15, 4e-4),
        ("math_tools-0", tools, 15, 4e-4),
        ("smollm2_gym-0", gym, 8, 2e-5),
        ("smollm2_words-0", words, 8, 2e-5),
        ("text_to_sql-1", sql, 30, 4e-4),
        ("math_tools-1", tools, 8, 4e-5),
        ("smollm2_sums-0", smol, 6, 2e-5),
        ("smollm2_gym-1", gym, 8, 1e-6),
        ("text_to_sql-2", sql, 10, 4e-5),
        ("math_tools-2", tools, 30, 4e-4),
        ("smollm2_words-1", words, 6, 5e-6),
        ("text_to_sql-3", sql, 15, 2e-3),
        ("math_tools-3", tools, 15, 2e-3),
        ("smollm2_sums-1", smol, 6, 1e-6),
        ("smollm2_gym-2", gym, 12, 4e-5),
        ("smollm2_words-2", words, 12, 4e-5),
    ):
        yield Run(
            name=name,
            family=name.rpartition("-")[0],
            recipe=recipe,
            policy="smollm2" if "smol" in name else "starter",
            settings={**small, "loop.steps": steps, "learner.learning_rate": rate},
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
        if run.family in GENERATORS:
            place = _make_family(run.family, folder)
            settings = {**run.settings, "policy.model": _make_policy(run.family, run.policy, folder)}
            lines = (place / "train.jsonl").read_text().splitlines()
            tasks = [Task(id=row["id"], input=row["input"], answer=row["answer"]) for row in map(json.loads, lines)]
            row = _train_here(load_recipe(place / "recipe.toml", settings), tasks)
        else:
            row = _train_example(run, folder)
    except Exception as raised:  # noqa: BLE001  one run of many
        error = f"{type(raised).__name__}: {raised}"[:300]
    return {**asdict(run), "seconds": round(time.monotonic() - began, 1), "error": error, **row}


def _train_example(run: Run, folder: Path) -> dict[str, Any]:
    """Train an example by the command line, and read what the run wrote of itself."""
    where = folder / "runs" / run.name
    shutil.rmtree(where, ignore_errors=True)
    settings = {**run.settings, "loop.checkpoint_every": 1000}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "lightningrl", "train", str(ROOT / run.recipe), "--run", str(where), *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=3600.0)
    made = json.loads((where / "forecast.json").read_text())
    rewards = [json.loads(line).get("reward") for line in (where / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(where / "checkpoints", ignore_errors=True)
    return {"evidence": made["evidence"], "outcome": made["outcome"], "rewards": rewards}


def _train_here(recipe: Recipe, tasks: Sequence[Task]) -> dict[str, Any]:
    """Train a policy of one call in this process: engine, credit and learner of a run, without server and workers."""
    plugins = load_plugins()
    models = {"policy": str(recipe.policy.model)}
    backend: Any = build_backends(recipe, plugins, models, will_run=False)["policy"]()
    _, scorer = build_credit(recipe, plugins, models)
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    watch, rewards = _Watch(recipe, {"policy": backend}), []
    order = random.Random(recipe.loop.seed).sample(range(len(tasks)), len(tasks))
    loop = recipe.loop
    for step in range(loop.steps):
        chosen = [tasks[order[(step * loop.tasks_per_step + n) % len(tasks)]] for n in range(loop.tasks_per_step)]
        rollouts = asyncio.run(_roll_out(backend.engine, tokenizer, chosen, step, recipe))
        credited = scorer.credit(rollouts)
        backend.learn(scorer.build(credited).samples)
        rewards.append(fmean(rollout.reward or 0.0 for rollout in rollouts))
        watch.step(credited)
    evidence = gather(recipe, watch.groups, moved=at_full_rate(watch.moved, recipe))
    assert evidence is not None
    rows = [{"step": float(step + 1), "reward": reward} for step, reward in enumerate(rewards)]
    outcome = measure_outcome(rows, evidence.reward, recipe.reward_bounds)
    return {"evidence": evidence.model_dump(), "outcome": outcome.model_dump() if outcome else None, "rewards": rewards}


class _Watch:
    """Takes the first step's groups, and what it moved."""

    def __init__(self, recipe: Recipe, backends: dict[str, Any]) -> None:
        self.groups: list[CreditedGroup] = []
        self.moved: float | None = None
        self._backends = backends

    def step(self, credited: list[CreditedGroup]) -> None:
        if not self.groups:
            self.groups, self.moved = credited, measure_moved(self._backends, credited)


async def _roll_out(engine: Any, tokenizer: Any, tasks: Sequence[Task], step: int, recipe: Recipe) -> list[Trajectory]:
    async def ask(task: Task, member: int) -> Trajectory:
        name = f"{step}-{task.id}-{member}"
        chat = [{"role": "user", "content": task.input}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        sampling = recipe.sampling.settings()
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

    members = range(recipe.loop.group_size)
    return list(await asyncio.gather(*(ask(task, member) for task in tasks for member in members)))


def _make_family(family: str, folder: Path) -> Path:
    place = folder / "families" / family
    if (place / "recipe.toml").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    entries = _draw(family, TASKS, seed=1)
    rows = [{"id": f"{family}/{i}", "input": e["question"], "answer": str(e["answer"])} for i, e in enumerate(entries)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "agent.py").write_text(AGENT)
    (place / "recipe.toml").write_text(
        f'name = "{family}"\nagent = "agent.py:answer"\ntasks.train = "train.jsonl"\npolicy.model = "none"\n'
        'rewards.right.use = "agent.py:right"\ncredit.use = "dr_grpo"\nsampling.max_tokens = 12\n'
        "runtime = { workers = 1, concurrency = 64 }\nloop = { tasks_per_step = 8, group_size = 8 }\n"
        "learner = { betas = [0.9, 0.99], warmup_steps = 2 }\n"
    )
    return place


def _draw(family: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    import reasoning_gym

    rows = reasoning_gym.create_dataset(family, seed=seed * 1_000_003, size=count, **GENERATORS[family])
    return [rows[number] for number in range(count)]


def _make_policy(family: str, kind: str, folder: Path) -> str:
    """The folder of a policy that has seen so many demonstrations of other tasks than the run's."""
    from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy

    place = folder / "policies" / f"{family}-{kind}"
    if (place / "tokenizer.json").exists():
        return str(place)
    count, share = POLICIES[kind]
    lot = random.Random(f"{family} {kind}")
    entries = _draw(family, max(count, 500), seed=2)
    answers = [str(entry["answer"]) for entry in entries]
    demonstrations = [
        Demonstration(
            messages=[
                {"role": "user", "content": entry["question"]},
                {"role": "assistant", "content": answer if lot.random() < share else lot.choice(answers)},
            ]
        )
        for entry, answer in zip(entries, answers, strict=True)
    ]
    words = r" ?[A-Za-z_]+|[0-9]|\n| ?[^\sA-Za-z_0-9]|\s"
    # what all questions begin and end with is one token each: prompts are a third as long
    questions = [str(entry["question"]) for entry in entries]
    first = _common(questions)
    last = _common([question[len(first) :][::-1] for question in questions])[::-1]
    phrases = [phrase for phrase in (first, last) if len(phrase) > 4]
    tokenizer = build_tokenizer(demonstrations[:500], words=words, phrases=phrases, context_length=512)
    model = build_model(tokenizer, width=64, layers=2, seed=7)
    if count:
        cold_start(model, tokenizer, [demonstrations[:count]], seed=7, batch_tokens=512)
    write_policy(place, model, tokenizer)
    return str(place)


def _common(texts: Sequence[str]) -> str:
    """The beginning that all texts share."""
    shortest, longest = min(texts), max(texts)
    return next((shortest[:n] for n, letter in enumerate(shortest) if letter != longest[n : n + 1]), shortest)


def fit(folder: Path) -> None:
    """Fit all runs, and say what the fit is worth on families that it has not seen."""
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row["evidence"] and row["outcome"]]
    evidence = [Evidence.model_validate(row["evidence"]) for row in rows]
    gains = [Outcome.model_validate(row["outcome"]).gain for row in rows]
    families = [row["family"] for row in rows]
    forecasts = [
        predict(one, _fit(evidence, gains, families, without={family}))
        for one, family in zip(evidence, families, strict=True)
    ]
    whole = _fit(evidence, gains, families, without=set())
    rank = spearman([forecast.gain for forecast in forecasts], gains)
    holds = [forecast.low <= gain <= forecast.high for forecast, gain in zip(forecasts, gains, strict=True)]
    errors = [abs(forecast.gain - gain) for forecast, gain in zip(forecasts, gains, strict=True)]
    told = {"spearman": rank or 0.0, "coverage": fmean(holds), "error": float(np.median(errors))}
    made = whole.model_copy(update={"runs": len(rows), "families": len(set(families)), **told})
    table = [
        {
            "name": row["name"],
            "policy": row["policy"],
            **{key.rpartition(".")[2]: value for key, value in row["settings"].items()},
            "gain": gain,
            "forecast": forecast.model_dump(),
            "features": features(one, whole.moved),
        }
        for row, one, gain, forecast in zip(rows, evidence, gains, forecasts, strict=True)
    ]
    numbers = json.loads(made.model_dump_json())
    text = ",\n".join(json.dumps(_rounded(row)) for row in table)
    TARGET.write_text(json.dumps(_rounded(numbers), indent=1)[:-2] + ',\n "table": [\n' + text + "\n]}\n")
    show()


def show() -> None:
    """Print what the committed file says of itself."""
    made = json.loads(TARGET.read_text())
    rows = made["table"]
    for family in sorted({row["name"].rpartition("-")[0] for row in rows}):
        own = [row for row in rows if row["name"].rpartition("-")[0] == family]
        held = sum(row["forecast"]["low"] <= row["gain"] <= row["forecast"]["high"] for row in own)
        shown = "  ".join(f"{row['forecast']['gain']:+.2f}/{row['gain']:+.2f}" for row in own)
        print(f"{family:22} {held} of {len(own)} within   forecast/gain  {shown}")
    for kind in sorted({row["policy"] for row in rows}):
        own = [row for row in rows if row["policy"] == kind]
        rank = spearman([row["forecast"]["gain"] for row in own], [row["gain"] for row in own])
        print(f"policies {kind!r}: {len(own)} runs, rank correlation {'-' if rank is None else f'{rank:.2f}'}")
    width = fmean(row["forecast"]["high"] - row["forecast"]["low"] for row in rows)
    print(
        f"{made['runs']} runs of {made['families']} families, each forecast by the others: rank correlation "
        f"{made['spearman']:.3f}, {100 * made['coverage']:.1f} % within the 90 % interval, its mean width {width:.3f}, "
        f"median error {made['error']:.3f}"
    )


def _fit(
    evidence: Sequence[Evidence], gains: Sequence[float], families: Sequence[str], *, without: set[str]
) -> Calibration:
    """Coefficients by ridge regression; the interval by residuals of families, each left out in its turn."""
    inside = [number for number, family in enumerate(families) if family not in without]
    bare = _ridge([evidence[i] for i in inside], [gains[i] for i in inside])
    residuals = []
    for family in sorted({families[i] for i in inside}):
        others = [i for i in inside if families[i] != family]
        model = _ridge([evidence[i] for i in others], [gains[i] for i in others])
        for i in inside:
            if families[i] == family:
                width = model.width[0] + model.width[1] * evidence[i].spread
                residuals.append((gains[i] - predict(evidence[i], model).gain) / width)
    ends = np.quantile(residuals, [0.05, 0.95], method="weibull")
    return bare.model_copy(update={"residuals": (float(ends[0]), float(ends[1]))})


def _ridge(evidence: Sequence[Evidence], gains: Sequence[float]) -> Calibration:
    moved = float(np.median([one.moved for one in evidence if one.moved is not None] or [0.0]))
    rows = [features(one, moved) for one in evidence]
    names = sorted(rows[0])
    values = np.array([[row[name] for name in names] for row in rows])
    means, scales = values.mean(0), values.std(0) + 1e-9
    x, y = (values - means) / scales, np.array(gains)
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(len(names)), x.T @ (y - y.mean()))
    return Calibration(
        command=COMMAND,
        runs=len(rows),
        families=0,
        spearman=0.0,
        coverage=0.0,
        error=0.0,
        intercept=float(y.mean()),
        coefficients=dict(zip(names, weights.tolist(), strict=True)),
        means=dict(zip(names, means.tolist(), strict=True)),
        scales=dict(zip(names, scales.tolist(), strict=True)),
        residuals=(0.0, 0.0),
        width=WIDTH,
        moved=moved,
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "fit", "show"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/forecast"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.what == "train":
        train(arguments.folder)
    elif arguments.what == "fit":
        fit(arguments.folder)
    else:
        show()


if __name__ == "__main__":
    main()
