"""Does a long run grow? Memory of trainer (engine and learner in it), server and workers over 2,000 steps of a real
run.

    python benchmarks/memory.py                      2,000 steps of 4 rollouts of 2 calls, 25 thousand parameters
    python benchmarks/memory.py --steps 400          a first look

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from measuring import lightningrl, result

EVERY: Final = 50
"""Steps from one look to the next."""
WARM_UP: Final = 0.2
"""Share of the steps in which caches fill, pools and allocators find their size."""
TARGET_MB: Final = 10.0
"""Growth in 1,000 steps that counts as flat, of each kind of process."""
AGENT: Final = """
import openai

client = openai.OpenAI(api_key="sk-the-users-own")

def answer(task):
    messages = [{"role": "user", "content": task["word"]}]
    for _ in range(2):
        said = client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return said
"""
DATA: Final = """
def tasks():
    return [{"id": f"t{n}", "input": {"word": f"word {n}"}} for n in range(64)]

def vowels(task, output, trajectory):
    return sum(letter in "aeiou" for letter in output) / (1 + len(output))
"""
RECIPE: Final = """
agent = "agent.py:answer"
tasks.train = "data.py:tasks"
policy.model = "policy"
rewards.vowels.use = "data.py:vowels"
credit.use = "dr_grpo"
sampling.max_tokens = 8
runtime = {{ workers = 2, concurrency = 2 }}
loop = {{ steps = {steps}, tasks_per_step = 1, group_size = 4, checkpoint_every = 100 }}
learner.learning_rate = 1e-3
"""
KINDS: Final = ("trainer", "server", "worker", "other")

Look = dict[str, float]
"""`step`, and MB by kind of process."""


def watch(steps: int) -> list[Look]:
    """Run it; a look every so many steps."""
    from lightningrl_torch.testing import save_policy

    looks: list[Look] = []
    with tempfile.TemporaryDirectory(prefix="lightningrl-memory-") as scratch:
        folder = Path(scratch)
        save_policy(folder / "policy")
        for name, text in {"agent.py": AGENT, "data.py": DATA, "recipe.toml": RECIPE.format(steps=steps)}.items():
            (folder / name).write_text(text)
        with (folder / "output").open("wb") as output:
            command = lightningrl("train", str(folder / "recipe.toml"), "--run", str(folder / "run"))
            train = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while train.poll() is None:
                step = steps_done(folder / "run/metrics.jsonl")
                if step >= (looks[-1]["step"] if looks else 0) + EVERY:
                    looks.append({"step": step, **memory_mb(train.pid)})
                    print(json.dumps(looks[-1]), file=sys.stderr, flush=True)
                time.sleep(0.2)
        finally:
            train.terminate()
            train.wait()
        if train.returncode:
            sys.exit(f"the run ended with status {train.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
    return looks


def steps_done(metrics: Path) -> int:
    """Step of the last whole line."""
    try:
        whole = metrics.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole)["step"]) if whole else 0


def memory_mb(pid: int) -> Look:
    """Resident memory that no file backs, by kind of process."""
    sizes: dict[str, float] = defaultdict(float)
    train = psutil.Process(pid)
    for process in (train, *train.children(recursive=True)):
        try:
            words = " ".join(process.cmdline())
            kind = "trainer" if process.pid == pid else next((kind for kind in KINDS[1:3] if kind in words), "other")
            info = process.memory_info()
            sizes[kind] += (info.rss - getattr(info, "shared", 0)) / 1e6  # pages of files come and go
        except psutil.NoSuchProcess:
            continue
    return {kind: round(size, 2) for kind, size in sizes.items()}


def report(looks: Sequence[Look]) -> None:
    after = [look for look in looks if look["step"] >= WARM_UP * looks[-1]["step"]]
    steps = np.array([look["step"] for look in after])
    growths = []
    print(f"{looks[-1]['step']:.0f} steps, {len(looks)} looks")
    for kind in KINDS:
        sizes = np.array([look.get(kind, 0.0) for look in after])
        if not sizes.any():
            continue
        growths.append(1000 * float(np.polyfit(steps, sizes, 1)[0]))
        print(f"{kind:8} {sizes[0]:7.1f} MB after the warm-up, {sizes[-1]:7.1f} MB at the end, ", end="")
        print(f"{growths[-1]:+.2f} MB in 1,000 steps (target: {TARGET_MB:g})")
    result(max(growths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    report(watch(parser.parse_args().steps))


if __name__ == "__main__":
    main()
