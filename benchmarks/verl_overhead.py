"""What LightningRL adds to verl's step of 64 rollouts x 4 calls, by the size of the policy.

    .venv-verl/bin/python benchmarks/verl_overhead.py                   28 million parameters, 3 steps (ten minutes on two cores)
    .venv-verl/bin/python benchmarks/verl_overhead.py --width 768 --layers 12 --steps 2

The policy has random weights: time does not ask whether it learns. Each rollout is one conversation of four calls of up to 64 tokens. The
overhead is the server's CPU time (gateway, store, leases, traces) and what stands in line between verl's phases: credit, rows, hand-over.
None of it computes with the policy, so its share falls as the policy grows.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from verl_text_to_sql import ROOT, RUNS, report, show, train

STARTER = ROOT / "examples" / "text_to_sql" / "starter"
AGENT = '''\
"""Four turns of one conversation."""

from openai import OpenAI

client = OpenAI(api_key="any")


def answer(text):
    messages = [{"role": "user", "content": text}]
    for turn in range(4):
        said = client.chat.completions.create(model="any", messages=messages).choices[0].message.content or "-"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Question {turn}: what is the score?"}]
    return messages[-2]["content"]
'''
DATA = '''\
"""Tasks without end, and a reward that is as good as any."""


def tasks():
    return [{"id": f"t{number}", "input": f"Question: what is the score of number {number}?"} for number in range(64)]


def parity(task, output, trajectory):
    return float(sum(map(ord, output)) % 2)
'''
RECIPE = """\
name = "overhead"
agent = "agent.py:answer"
[tasks]
train = "data.py:tasks"
[policy]
model = "policy"
[rewards.parity]
use = "data.py:parity"
[sampling]
max_tokens = 64
[runtime]
workers = 2
concurrency = 32
[loop]
tasks_per_step = 8
group_size = 8
checkpoint_every = 1000
[learner]
learning_rate = 1e-5
"""


def write_recipe(folder: Path, width: int, layers: int) -> int:
    """A recipe whose policy has random weights; returns how many parameters it has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in (("agent.py", AGENT), ("data.py", DATA), ("recipe.toml", RECIPE)):
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    config = LlamaConfig.from_pretrained(
        STARTER, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return int(model.num_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    name = f"overhead-{options.width}x{options.layers}"
    recipe = RUNS / "recipes" / name
    parameters = write_recipe(recipe, options.width, options.layers)
    shutil.rmtree(RUNS / name, ignore_errors=True)
    train(name, options.steps, recipe=recipe, settings=("validation.every=0",))
    found = report(name)
    show(f"{parameters / 1e6:.0f} million parameters", found)
    share = (found["credit"] + found["handover"] + found["server_cpu"]) / found["step"]
    print(f"  all of it, of this step                   {share:.1%}   (target: 5 %)")


if __name__ == "__main__":
    main()
