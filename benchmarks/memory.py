"""Does a long run grow? Resident memory of trainer (engine and learner in it), server and workers over 2,000 steps of a real run.

    python benchmarks/memory.py                      2,000 steps of 4 rollouts of 2 calls, a policy of 25 thousand parameters
    python benchmarks/memory.py --steps 400          a first look
    python benchmarks/memory.py --read FILE          the table of what an earlier call wrote

A straight line through the figures after the first fifth of the steps says what 1,000 more steps cost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
EVERY = 50
"""Steps from one look to the next."""
WARM_UP = 0.2
"""Of the steps; caches fill, pools and allocators find their size."""
TARGET_MB = 10.0
"""Growth in 1,000 steps that counts as flat, of each kind of process."""
AGENT = """
import openai

client = openai.OpenAI(api_key="sk-the-users-own")

def answer(task):
    messages = [{"role": "user", "content": task["word"]}]
    for _ in range(2):
        said = client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return said
"""
DATA = """
def tasks():
    return [{"id": f"t{n}", "input": {"word": f"word {n}"}} for n in range(64)]

def vowels(task, output, trajectory):
    return sum(letter in "aeiou" for letter in output) / (1 + len(output))
"""
RECIPE = """
agent = "agent.py:answer"

[tasks]
train = "data.py:tasks"

[policy]
model = "policy"

[rewards.vowels]
use = "data.py:vowels"

[credit]
use = "dr_grpo"

[sampling]
max_tokens = 8

[runtime]
workers = 2
concurrency = 2

[loop]
steps = {steps}
tasks_per_step = 1
group_size = 4
checkpoint_every = 100

[learner]
learning_rate = 1e-3
"""

Look = dict[str, float]
"""`step`, and MB by kind of process."""


def watch(steps: int, out: Path) -> None:
    """Run it; every so many steps a look, a line of `out`."""
    from lightningrl_torch.testing import save_policy

    seen = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lightningrl-memory-") as scratch, out.open("w") as lines:
        folder = Path(scratch)
        save_policy(folder / "policy")
        for name, text in {"agent.py": AGENT, "data.py": DATA, "recipe.toml": RECIPE.format(steps=steps)}.items():
            (folder / name).write_text(text)
        with (folder / "said").open("wb") as said:
            command = [sys.executable, "-m", "lightningrl", "train", str(folder / "recipe.toml"), "--run", str(folder / "run")]
            train = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            while train.poll() is None:
                step = steps_done(folder / "run/metrics.jsonl")
                if step >= seen + EVERY:
                    seen = step
                    print(json.dumps({"step": step, **memory_mb(train.pid)}), file=lines, flush=True)
                time.sleep(0.2)
        finally:
            train.terminate()
            train.wait()
        if train.returncode:
            sys.exit(f"the run ended with status {train.returncode}:\n{(folder / 'said').read_text()[-3000:]}")


def steps_done(metrics: Path) -> int:
    """The last whole line's step."""
    try:
        whole = metrics.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole)["step"]) if whole else 0


def memory_mb(pid: int) -> Look:
    """Resident and backed by no file, by kind: the trainer, its server, its workers, others together."""
    found: dict[str, float] = defaultdict(float)
    train = psutil.Process(pid)
    for process in (train, *train.children(recursive=True)):
        try:
            words = " ".join(process.cmdline())
            kind = "trainer" if process.pid == pid else next((kind for kind in ("server", "worker") if kind in words), "other")
            info = process.memory_info()
            found[kind] += (info.rss - getattr(info, "shared", 0)) / 1e6  # pages of files come and go with the machine's memory
        except psutil.NoSuchProcess:
            continue
    return {kind: round(size, 2) for kind, size in found.items()}


def growth_mb(looks: Sequence[Look]) -> Mapping[str, tuple[float, float, float]]:
    """By kind of process: MB where the line begins, MB at the last look, MB that 1,000 steps add."""
    after = [look for look in looks if look["step"] >= WARM_UP * looks[-1]["step"]]
    steps = np.array([look["step"] for look in after])
    found = {}
    for kind in ("trainer", "server", "worker", "other"):
        sizes = np.array([look.get(kind, 0.0) for look in after])
        if sizes.any():
            found[kind] = (float(sizes[0]), float(sizes[-1]), 1000 * float(np.polyfit(steps, sizes, 1)[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/memory.jsonl", help="every look, a line of JSON each")
    parser.add_argument("--read", type=Path, help="measure nothing; read this file")
    options = parser.parse_args()
    if not options.read:
        watch(options.steps, options.out)
    looks: list[Look] = [json.loads(line) for line in (options.read or options.out).read_text().splitlines()]
    grown = growth_mb(looks)
    print(f"{looks[-1]['step']:.0f} steps, {len(looks)} looks")
    for kind, (first, last, growth) in grown.items():
        print(f"{kind:8} {first:7.1f} MB after the warm-up, {last:7.1f} MB at the end, {growth:+.2f} MB in 1,000 steps")
    print(f"target: at most {TARGET_MB:g} MB in 1,000 steps, each")
    print(f"RESULT {max(growth for _, _, growth in grown.values()):.2f}")


if __name__ == "__main__":
    main()
