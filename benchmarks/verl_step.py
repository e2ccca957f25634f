"""Training by verl's own trainer under Ray, vLLM serving the policy: the reward, its control, and what LightningRL adds
to a step.

    .venv-verl/bin/python benchmarks/verl_step.py sql        text-to-SQL: 20 steps, 3 seeds, a control (learning rate 0)
    .venv-verl/bin/python benchmarks/verl_step.py sql --report   only read what an earlier call left in runs/verl
    .venv-verl/bin/python benchmarks/verl_step.py overhead   28 million random weights, 3 steps: ten minutes
    .venv-verl/bin/python benchmarks/verl_step.py overhead --width 768 --layers 12 --steps 2

Every run is a plain `lightningrl train … --backend verl` of 64 rollouts a step, about four calls each. What LightningRL
adds is the server's CPU time (gateway, store, leases, traces), and in line credit, rows and the hand-over. None of it
computes with the policy, so its share falls as the policy grows. `overhead`: each rollout is one conversation of four
calls of up to 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from measuring import ROOT, lightningrl

RUNS: Final = ROOT / "runs" / "verl"
EXAMPLE: Final = ROOT / "examples" / "text_to_sql"
SETTINGS: Final = (
    *("loop.tasks_per_step=8", "loop.group_size=8", "loop.checkpoint_every=10"),
    *("validation.tasks=80", "validation.every=10"),
)
AGENT: Final = '''\
"""Four turns of one conversation."""

from openai import OpenAI

client = OpenAI(api_key="any")


def answer(text):
    messages = [{"role": "user", "content": text}]
    for turn in range(4):
        said = client.chat.completions.create(model="any", messages=messages).choices[0].message.content or "-"
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": f"Question {turn}: what is the score?"})
    return messages[-2]["content"]


def tasks():
    return [{"id": f"t{number}", "input": f"Question: what is the score of number {number}?"} for number in range(64)]


def parity(task, output, trajectory):
    """A reward that is as good as any."""
    return float(sum(map(ord, output)) % 2)
'''
RECIPE: Final = """\
name = "overhead"
agent = "agent.py:answer"
tasks.train = "agent.py:tasks"
policy.model = "policy"
rewards.parity.use = "agent.py:parity"
sampling.max_tokens = 64
runtime = { workers = 2, concurrency = 32 }
loop = { tasks_per_step = 8, group_size = 8, checkpoint_every = 1000 }
learner.learning_rate = 1e-5
"""


def train(name: str, steps: int, recipe: Path, settings: Sequence[str]) -> None:
    """Run one training and keep, beside its metrics, when it began and what CPU time the server used."""
    folder = RUNS / name
    words = ["--backend", "verl", "--steps", str(steps), "--run", str(folder)]
    words += [f"--set={setting}" for setting in ("learner.max_tokens_per_microbatch=65536", *settings)]
    began = time.time()
    process = subprocess.Popen(lightningrl("train", str(recipe), *words))
    used: list[tuple[float, float]] = []
    while process.poll() is None:
        time.sleep(1.0)
        seconds = server_seconds(process.pid)
        if seconds is not None:
            used.append((time.time(), seconds))
    if process.returncode:
        raise SystemExit(f"{name}: lightningrl train ended with status {process.returncode}")
    (folder / "server_cpu.json").write_text(json.dumps({"began": began, "used": used}) + "\n", encoding="utf-8")


def server_seconds(pid: int) -> float | None:
    """CPU time of the run's server process so far."""
    try:
        for child in psutil.Process(pid).children():
            if "lightningrl_server" in child.cmdline():
                times = child.cpu_times()
                return float(times.user + times.system)
    except psutil.Error:
        return None
    return None


def show(name: str) -> tuple[float, float]:
    """Print a run's figures; seconds that LightningRL adds to a step, and those of a step."""
    folder = RUNS / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "seconds" in record]
    rewards = [record["validation/reward"] for record in records if "validation/reward" in record]
    cpu = json.loads((folder / "server_cpu.json").read_text(encoding="utf-8"))
    later = steps[1:] or steps  # the first step warms everything up
    start, end = later[0]["time"] - later[0]["seconds"], later[-1]["time"]
    inside = [used for when, used in cpu["used"] if start <= when <= end]
    server = (inside[-1] - inside[0]) / len(later) if len(inside) > 1 else 0.0
    step, credit, rows, handover = (
        mean(later, key) for key in ("seconds", "seconds_credit", "learn/seconds_rows", "learn/seconds_handover")
    )
    print(f"\n{name}")
    print(f"  from the command to the first step {steps[0]['time'] - steps[0]['seconds'] - cpu['began']:.0f} s")
    if rewards:
        print(f"  validation reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
    print(
        f"  training reward {mean(steps[:3], 'reward'):.3f} → {mean(steps[-3:], 'reward'):.3f} (means of three steps)"
    )
    gap = max(record["learn/probability_gap_max"] for record in steps)
    print(f"  largest gap of a sampled token's probability, all steps {gap:.1e}")
    print(f"  a step of 64 rollouts of {mean(later, 'calls_per_rollout'):.1f} calls {step:.1f} s", end="")
    print(f", {mean(later, 'seconds_collect'):.2f} s of it collecting")
    for part in ("old_log_prob", "adv", "update_actor", "update_weights"):
        print(f"    verl: {part:16} {mean(later, f'learn/verl/timing_s/{part}'):.2f} s")
    print(f"  LightningRL in line {(credit + handover) / step:.1%}: credit and samples {credit:.3f} s, ", end="")
    print(f"hand-over {handover:.3f} s, rows {rows:.3f} s of it")
    print(f"  beside the rollouts: server CPU {server:.2f} s, {server / step:.1%}")
    return credit + handover + server, step


def mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(record[key] for record in records) / len(records))


def make_recipe(folder: Path, width: int, layers: int) -> int:
    """A recipe whose policy has random weights; returns how many parameters it has."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "head_dim": 64,
    }
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(EXAMPLE / "starter", **sizes))
    model.save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(EXAMPLE / "starter").save_pretrained(folder / "policy")
    return int(model.num_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sql", "overhead"))
    parser.add_argument("--steps", type=int, help="20 of `sql`, 3 of `overhead`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    if options.what == "overhead":
        name = f"overhead-{options.width}x{options.layers}"
        parameters = make_recipe(RUNS / "recipes" / name, options.width, options.layers)
        shutil.rmtree(RUNS / name, ignore_errors=True)
        train(name, options.steps or 3, RUNS / "recipes" / name, ("validation.every=0",))
        added, step = show(name)
        print(
            f"  all of it, with {parameters / 1e6:.0f} million parameters: {added / step:.1%} of a step (target: 5 %)"
        )
        return
    steps = options.steps or 20
    runs = {f"train-{steps}-seed-{seed}": (*SETTINGS, f"loop.seed={seed}") for seed in range(options.seeds)}
    runs[f"control-{steps}"] = (*SETTINGS, "learner.learning_rate=0.0")
    for name, settings in runs.items():
        if not options.report:
            train(name, steps, EXAMPLE, settings)
        show(name)


if __name__ == "__main__":
    main()
