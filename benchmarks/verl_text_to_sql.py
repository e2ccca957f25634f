"""Text-to-SQL trained by verl's own trainer under Ray, vLLM serving the policy: the reward, its control, and where a step's time goes.

    .venv-verl/bin/python benchmarks/verl_text_to_sql.py                        20 steps, 3 seeds, a control (learning rate 0): 20 minutes
    .venv-verl/bin/python benchmarks/verl_text_to_sql.py --steps 5 --seeds 1    a quick look
    .venv-verl/bin/python benchmarks/verl_text_to_sql.py --report               only read what an earlier call left in runs/verl

Every run is a plain `lightningrl train examples/text_to_sql --backend verl`: 64 rollouts a step, about four calls each. The overhead is
what LightningRL adds to verl's own step: the server's CPU time (gateway and store), credit, rows, and the hand-over to verl.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "verl"
EXAMPLE = ROOT / "examples" / "text_to_sql"
SETTINGS = (
    "loop.tasks_per_step=8",
    "loop.group_size=8",
    "validation.tasks=80",
    "validation.every=10",
    "loop.checkpoint_every=10",
)


def train(name: str, steps: int, *, recipe: Path = EXAMPLE, settings: Sequence[str] = ()) -> None:
    """Run one training and keep, beside its metrics, when it began and what CPU time the server used."""
    folder = RUNS / name
    command = [sys.executable, "-m", "lightningrl", "train", str(recipe), "--backend", "verl"]
    command += ["--steps", str(steps), "--run", str(folder), "--set", "learner.max_tokens_per_microbatch=65536"]
    for setting in settings:
        command += ["--set", setting]
    began = time.time()
    process = subprocess.Popen(command)
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


def report(name: str) -> dict[str, float]:
    """What the run's metrics say."""
    folder = RUNS / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "seconds" in record]
    validations = [record for record in records if "validation/reward" in record]
    cpu = json.loads((folder / "server_cpu.json").read_text(encoding="utf-8"))
    first = steps[0]["time"] - steps[0]["seconds"]
    later = steps[1:] or steps  # the first step warms everything up
    seconds = sum(record["seconds"] for record in later)
    learn = {part: sum(record[f"learn/{part}"] for record in later) for part in ("seconds_rows", "seconds_handover", "seconds_verl")}
    start, end = later[0]["time"] - later[0]["seconds"], later[-1]["time"]
    inside = [used for when, used in cpu["used"] if start <= when <= end]
    server = inside[-1] - inside[0] if len(inside) > 1 else 0.0
    credit = sum(record["seconds_credit"] for record in later)
    verl = {part: mean(later, f"learn/verl/timing_s/{part}") for part in ("old_log_prob", "adv", "update_actor", "update_weights")}
    return {
        "to_first_step": first - cpu["began"],
        "validation_start": validations[0]["validation/reward"] if validations else float("nan"),
        "validation_end": validations[-1]["validation/reward"] if validations else float("nan"),
        "reward_first": mean(steps[:3], "reward"),
        "reward_last": mean(steps[-3:], "reward"),
        "gap_max": max(record["learn/probability_gap_max"] for record in steps),
        "step": seconds / len(later),
        "collect": mean(later, "seconds_collect"),
        "calls": mean(later, "calls_per_rollout"),
        "server_cpu": server / len(later),
        "credit": credit / len(later),
        "rows": learn["seconds_rows"] / len(later),
        "handover": learn["seconds_handover"] / len(later),
        "in_line": (credit + learn["seconds_handover"]) / seconds,
        "beside": server / seconds,
        **{f"verl_{part}": value for part, value in verl.items()},
    }


def mean(records: list[dict[str, float]], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


def show(name: str, found: dict[str, float]) -> None:
    print(f"\n{name}")
    print(f"  from the command to the first step        {found['to_first_step']:.0f} s")
    if not math.isnan(found["validation_start"]):
        print(f"  held-out accuracy                         {found['validation_start']:.3f} -> {found['validation_end']:.3f}")
    print(f"  reward, first and last three steps        {found['reward_first']:.3f} -> {found['reward_last']:.3f}")
    print(f"  rollout against trainer, largest gap      {found['gap_max']:.1e} (probability of a sampled token, all steps)")
    print(f"  one step (64 rollouts x {found['calls']:.1f} calls)         {found['step']:.1f} s")
    print(f"    collecting rollouts                     {found['collect']:.2f} s")
    for part in ("old_log_prob", "adv", "update_actor", "update_weights"):
        print(f"    verl: {part:33} {found[f'verl_{part}']:.2f} s")
    print(f"  LightningRL's share, in line              {found['in_line']:.1%}")
    print(f"    credit and samples                      {found['credit']:.3f} s")
    print(f"    hand-over to verl, rows {found['rows']:.3f} s of it     {found['handover']:.3f} s")
    print(f"  beside the rollouts: server CPU           {found['beside']:.1%} (gateway, store, leases, traces)")
    print(f"    a step                                  {found['server_cpu']:.2f} s")
    total = found["credit"] + found["handover"] + found["server_cpu"]
    print(f"  all of it, {total:.2f} s, is 5 % of a step of     {total / 0.05:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    runs = {f"train-{options.steps}-seed-{seed}": (*SETTINGS, f"loop.seed={seed}") for seed in range(options.seeds)}
    runs[f"control-{options.steps}"] = (*SETTINGS, "learner.learning_rate=0.0")
    for name, settings in runs.items():
        if not options.report:
            train(name, options.steps, settings=settings)
        show(name, report(name))


if __name__ == "__main__":
    main()
