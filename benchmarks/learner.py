"""Cost of learning a step in the torch backend, of small random policies and random tokens.

python benchmarks/learner.py trees [--repeats 3] [--traces search coding …] [--microbatch 16384]
    CPU seconds of a step: what rows begin alike with computed once, against merged rows and plain one-call rows, for
    groups of rollouts in the shape of five kinds of agents. The forms take turns; the least time counts. `gradient` =
    the largest difference of any parameter's gradient from that of the plain rows (float32)
python benchmarks/learner.py threads
    a step on one thread, on two, and on two where another thread of the process has a team, too. Such a team comes of
    any operation on several threads, for good; `TorchBackend` therefore computes with several threads in one thread
    alone
python benchmarks/learner.py critic
    memory, time of a step and of a step's values with a critic, beside none; and the CPU of its credit
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import least_cpu_ms

from lightningrl.advantages import count_distinct
from lightningrl.types import Sample, Trajectory, TrajectoryGroup
from lightningrl_credit.samples import Rows, build_samples
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.device import cpu_threads
from lightningrl_torch.testing import make_sample, save_policy

VOCABULARY = 768
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "eos_token_id": None,
}
Calls = Sequence[tuple[list[int], list[int]]]
"""Prompt and completion of each call of a rollout."""

rng = random.Random(0)


def tokens(low: int, high: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


def search(system: list[int], task: list[int]) -> Calls:
    """Five short queries and long results, in one growing history."""
    return growing(system + task, turns=5, says=(25, 45), sees=(200, 350))


def coding(system: list[int], task: list[int]) -> Calls:
    """Eight edits and what the tests say."""
    return growing(system + task, turns=8, says=(80, 150), sees=(60, 150))


def growing(history: list[int], *, turns: int, says: tuple[int, int], sees: tuple[int, int]) -> Calls:
    calls = []
    for _ in range(turns):
        completion = tokens(*says)
        calls.append((history, completion))
        history = history + completion + tokens(*sees)
    return calls


def thinking(system: list[int], task: list[int]) -> Calls:
    """Six calls; what a call thought is stripped from the history of the next."""
    history, calls = system + task, []
    for _ in range(6):
        thoughts, answer = tokens(100, 200), tokens(30, 50)
        calls.append((history, thoughts + answer))
        history = history + answer + tokens(100, 200)
    return calls


def text_to_sql(system: list[int], task: list[int]) -> Calls:
    """The shipped example: a query, and for half of the rollouts another with a prompt of its own."""
    write = system[:20] + task
    calls: list[tuple[list[int], list[int]]] = [(write, tokens(15, 30))]
    if rng.random() < 0.5:
        calls.append((system[20:40] + task + calls[0][1] + tokens(10, 20), tokens(15, 30)))
    return calls


def single_call(system: list[int], task: list[int]) -> Calls:
    """A prompt and an answer."""
    return [(system + task, tokens(20, 60))]


TRACES: dict[str, tuple[Callable[[list[int], list[int]], Calls], int, int, int]] = {
    # rollout, groups, rollouts of each, tokens of a task
    "search": (search, 2, 4, 60),
    "coding": (coding, 2, 4, 300),
    "thinking": (thinking, 2, 4, 100),
    "text_to_sql": (text_to_sql, 16, 8, 150),
    "single_call": (single_call, 16, 8, 60),
}


def make_groups(name: str) -> list[TrajectoryGroup]:
    rollout, groups, size, task_tokens = TRACES[name]
    system, made = tokens(120, 120), []
    for group in range(groups):
        task = tokens(task_tokens, task_tokens)
        members = []
        for member in range(size):
            name, transitions = f"{group}/{member}", []
            for number, (prompt, completion) in enumerate(rollout(system, task)):
                parent = f"{name}/{number - 1}" if number else None
                transitions.append(
                    make_transition(
                        f"{name}/{number}", prompt=prompt, completion=completion, index=number, parent=parent
                    )
                )
            members.append(make_trajectory(name, transitions))
        made.append(TrajectoryGroup(id=str(group), trajectories=tuple(members)))
    return made


def make_rows(groups: Sequence[TrajectoryGroup], rows: Rows) -> list[Sample]:
    chance = np.random.default_rng(0)

    def credit_of(member: Trajectory) -> tuple[np.ndarray, ...]:
        return tuple(chance.normal(size=len(call.completion_ids)).astype(np.float32) for call in member.transitions)

    credit = [tuple(map(credit_of, group.members)) for group in groups]
    return build_samples(groups, credit, rows=rows)


def trees(folder: Path, options: argparse.Namespace) -> None:
    print("| trace | rows | tokens | distinct | trie_efficiency | tree, s | plain / tree | merged / tree | gradient |")
    print("|---|---|---|---|---|---|---|---|---|")
    settings: dict[str, Any] = {"policy": save_policy(folder, **SHAPE), "threads": 1, "learning_rate": 0.0}
    settings["max_tokens_per_microbatch"] = options.microbatch
    tree, plain = TorchBackend(**settings), TorchBackend(**settings, share_prefixes=False)
    for name in options.traces:
        print(measure(name, tree, plain, options.repeats), flush=True)
    tree.close()
    plain.close()


def measure(name: str, tree: TorchBackend, plain: TorchBackend, repeats: int) -> str:
    groups = make_groups(name)
    calls, merged = make_rows(groups, "call"), make_rows(groups, "merged")
    forms = {"tree": (tree, calls), "plain": (plain, calls), "merged": (plain, merged)}
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    efficiency = 0.0
    for _ in range(repeats):
        for form, (backend, rows) in forms.items():
            began = time.process_time()
            metrics = backend.learn(rows).metrics
            seconds[form].append(time.process_time() - began)
            efficiency = metrics["trie_efficiency"] if form == "tree" else efficiency
    gradients = [backend.learner.gradients(calls) for backend in (tree, plain)]
    tree_gradients, plain_gradients = gradients
    difference = max(
        float((tree_gradients[name] - plain_gradients[name]).abs().max() / plain_gradients[name].abs().max())
        for name in plain_gradients
    )
    least = {form: min(times) for form, times in seconds.items()}
    all_tokens = sum(len(row.token_ids) for row in calls)
    ratios = [f"{least[form] / least['tree']:.2f}" for form in ("plain", "merged")]
    cells = [
        name,
        len(calls),
        all_tokens,
        count_distinct(calls),
        f"{efficiency:.3f}",
        f"{least['tree']:.2f}",
        *ratios,
        f"{difference:.0e}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


# ---------------------------------------------------------------------- threads


def threads(folder: Path, options: argparse.Namespace) -> None:
    def words(count: int) -> list[int]:
        return [rng.randrange(257, VOCABULARY) for _ in range(count)]

    rows = [
        make_sample(words(90), words(40), rng.gauss(0, 1), rollout=str(row), weight=1 / 200, logprobs=[-1.0] * 40)
        for row in range(200)
    ]
    with cpu_threads(1):
        policy = save_policy(folder, **SHAPE)
        first, second = (
            TorchBackend(policy=policy, device="cpu", threads=count, learning_rate=0.0) for count in (1, 2)
        )

        def seconds(backend: TorchBackend) -> float:
            """Least seconds on the clock: threads wait for each other."""
            return least_cpu_ms(lambda: backend.learn(rows), 4, clock=time.monotonic) / 1e3

        figures = {"one thread": seconds(first), "two threads": seconds(second)}
        stays = threading.Event()
        other = threading.Thread(target=_make_a_team, args=(stays,))
        other.start()
        figures["two threads, beside another team"] = seconds(second)
        stays.set()
        other.join()
        first.close()
        second.close()
    for name, value in figures.items():
        print(f"learn  {name:34s} {value:5.2f} s  {value / figures['one thread']:.2f}")


def _make_a_team(stays: threading.Event) -> None:
    with cpu_threads(2):
        torch.ones(1_000_000).add(1.0)
    stays.wait()


def main() -> None:
    measures = {measure.__name__: measure for measure in (trees, threads)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=measures)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--microbatch", type=int, default=32768, help="max_tokens_per_microbatch; a larger tree is cut")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measures[options.what](Path(folder), options)


if __name__ == "__main__":
    main()
