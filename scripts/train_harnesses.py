"""Train the model in real coding harnesses for three steps, on a tiny policy, and check that nothing failed.

    python scripts/train_harnesses.py                  aider and pi, as `make test-peers-clients` installs them
    python scripts/train_harnesses.py pi --steps 5     one of them, longer

.clients/NAME ─► a recipe, a tiny random policy ─► lightningrl train ─► every rollout succeeded, every step learned
A random policy writes noise, so this shows that the way is whole and not that anything is learned: the reward is the
share of letters in what the harness printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from try_clients import Client, install, load_clients

from lightningrl.records import RolloutFilter
from lightningrl_runs.metrics import read_rows
from lightningrl_server.store import SqlStore
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_torch.testing import make_model

HARNESSES: Final = ("aider", "pi")
CONTEXT: Final = 16_384
"""Tokens; the tiny tokenizer's are bytes."""
RECIPE: Final = """\
agent = {{ harness = "{harness}" }}
tasks.train = "parts.py:tasks"
policy.model = "policy"
rewards.letters.use = "parts.py:share_of_letters"
credit.use = "dr_grpo"
sampling.max_tokens = 48
runtime = {{ workers = 1, concurrency = 4, timeout_s = 300 }}
loop = {{ steps = {steps}, tasks_per_step = 2, group_size = 4 }}
learner.learning_rate = 1e-3
"""
PARTS: Final = """\
def tasks():
    return [{"input": f"Write the file answer.txt with the text {number} in it."} for number in range(40, 44)]


def share_of_letters(task, output, trajectory):
    said = output["text"]
    return sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The end of a harness's run."""

    version: str
    rollouts: int
    calls: int
    trained_tokens: int
    seconds: float
    problems: tuple[str, ...]


def train(client: Client, steps: int) -> Training:
    """Install a harness, train the model in it, and look at what came of it."""
    version = client.packages[0]
    if (reason := install(client)) is not None:
        problem = f"cannot be installed: {reason}"
        return Training(version=version, rollouts=0, calls=0, trained_tokens=0, seconds=0.0, problems=(problem,))
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder, rooms = Path(name), Path(name) / "tmp"
        rooms.mkdir()
        write_parts(folder, client.harness, steps)
        environment = {
            **os.environ,
            "PATH": f"{client.bin_folder}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(rooms),
            "COLUMNS": "200",
        }
        command = [str(Path(sys.executable).with_name("lightningrl")), "train", "recipe.toml", "--run", "run"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        problems = [f"status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"] if done.returncode else []
        rows = read_rows(folder / "run")
        norms = [row["learn/grad_norm"] for row in rows if "learn/grad_norm" in row]
        if len(norms) != steps or not all(norms):
            problems.append(f"the norms of the gradients are {norms}, and there were to be {steps} above 0")
        left = [str(place) for place in rooms.glob("*/*")]
        problems += [f"left behind: {', '.join(left)}"] if left else []
        rollouts, calls, tokens = 0, 0, 0
        if (folder / "run/store.sqlite").exists():
            rollouts, calls, tokens, failures = asyncio.run(read_run(folder / "run"))
            problems += failures
            if rollouts != 8 * steps:
                problems.append(f"{rollouts} rollouts, not {8 * steps}")
    return Training(
        version=version,
        rollouts=rollouts,
        calls=calls,
        trained_tokens=tokens,
        seconds=seconds,
        problems=tuple(problems),
    )


def write_parts(folder: Path, harness: str, steps: int) -> None:
    """The recipe, its functions and the policy."""
    (folder / "recipe.toml").write_text(RECIPE.format(harness=harness, steps=steps), encoding="utf-8")
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **ends)
    model.save_pretrained(folder / "policy")


async def read_run(folder: Path) -> tuple[int, int, int, list[str]]:
    """Rollouts, their calls, the trained ones' sampled tokens, and what went wrong in them."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}", read_only=True)
    try:
        records = await store.list_rollouts(RolloutFilter(limit=10_000))
        trajectories = await store.trajectories([record.spec.id for record in records])
    finally:
        await store.close()
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    outcomes = Counter(str(trajectory.outcome) for trajectory in trajectories)
    failures = [f"{count} rollouts ended as {name}" for name, count in outcomes.items() if name != "succeeded"]
    failures += [f"{each.rollout_id}: {each.error}" for each in trajectories if each.error][:3]
    tokens = sum(len(call.completion_ids) for call in calls if call.trainable)
    return len(trajectories), len(calls), tokens, failures


def main() -> None:
    clients = {client.harness: client for client in load_clients() if client.harness}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("harnesses", nargs="*", metavar="HARNESS", help=f"of {', '.join(clients)}")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := set(arguments.harnesses) - clients.keys():
        parser.error(f"no harness {min(unknown)!r}; there are: {', '.join(clients)}")
    lines, failed = [], False
    for name in arguments.harnesses or HARNESSES:
        training = train(clients[name], arguments.steps)
        failed = failed or bool(training.problems)
        print(f"{name}: {'; '.join(training.problems) or 'as expected'}", flush=True)
        cells = (
            training.version,
            training.rollouts,
            training.calls,
            training.trained_tokens,
            f"{training.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    print("\n| harness | rollouts | calls | sampled tokens | seconds |\n|---|---|---|---|---|", *lines, sep="\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
