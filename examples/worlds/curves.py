"""Trains each recipe of this folder over seeds, beside a control at learning rate 0, and prints the table of
docs/reference/results.md.

    python examples/worlds/curves.py                          the first two
    python examples/worlds/curves.py openenv --seeds 3        one of them
    python examples/worlds/curves.py openenv_tools --trl      one of them, and the same policy trained with TRL
    python examples/worlds/curves.py --report                 the table of what is there

It makes what a recipe needs: starting policies, task folders, and openenv's environment
(`make .venv-openenv/.installed`). Each is one `lightningrl sweep` in runs/worlds, which goes on where it was stopped.
TRL plays on the same server by its `environment_factory`, in an environment of its own: tasks, groups, steps and
settings are the recipe's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs" / "worlds"
RECIPES = ("openenv", "harbor", "openenv_tools", "reasoning_gym")
TRL = ("torch==2.13.0", "trl==1.16.0", "jmespath", "openenv>=0.10,<0.11")


def prepare(name: str) -> None:
    """Make what the recipe needs and what is not there."""
    starter = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["policy"]["model"]
    if not starter.startswith("package:") and not (HERE / starter / "config.json").exists():
        subprocess.run([sys.executable, "starters.py", starter], cwd=HERE, check=True)
    if name == "harbor" and not (HERE / "folders").exists():
        subprocess.run([sys.executable, "task_folders.py"], cwd=HERE, check=True)
    if name.startswith("openenv"):
        subprocess.run(["make", "-s", ".venv-openenv/.installed"], cwd=ROOT, check=True)


def sweep(name: str, seeds: int) -> None:
    rate = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["learner"]["learning_rate"]
    command = [str(Path(sys.executable).with_name("lightningrl")), "sweep", str(HERE / f"{name}.toml")]
    command += ["--seeds", str(seeds), "--set", f"learner.learning_rate={rate},0", "--sweep", str(RUNS / name)]
    subprocess.run(command, cwd=ROOT, check=True)


def train_with_trl(name: str, seeds: int) -> None:
    """Train the recipe's policy with TRL, once for each seed that has no result: `before`, `after`, `minutes`."""
    sys.path.append(str(ROOT / "benchmarks" / "peers"))
    from environment import environment

    from lightningrl_tasks_openenv import OpenEnvTasks
    from lightningrl_tasks_openenv.source import ServerProcess

    recipe: Any = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    python = environment("trl_openenv", TRL)
    for seed in range(seeds):
        out = RUNS / f"{name}-trl" / str(seed)
        if (out / "result.json").exists():
            continue
        out.mkdir(parents=True, exist_ok=True)
        command = recipe["tasks"]["options"]["command"].split()
        with closing(ServerProcess(command, folder=HERE, start_timeout_s=120)) as server:
            source = OpenEnvTasks(url=server.url())
            tasks = {
                split: [{"input": task.input, "answer": ""} for task in source.tasks(split, **recipe["tasks"][split])]
                for split in ("train", "validation")
            }
            (out / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
            words = ["--steps", recipe["loop"]["steps"], "--every", recipe["validation"]["every"], "--seed", seed]
            began = time.monotonic()
            subprocess.run(
                [python, HERE / "guess_trl.py", out, out / "tasks.json", *map(str, words)],
                env={**os.environ, "GUESS_URL": server.url()},
                check=True,
            )
        lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        curve = {line["step"]: line["validation/reward"] for line in lines if "validation/reward" in line}
        result = {"curve": curve, "minutes": (time.monotonic() - began) / 60}
        (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


def row_of_trl(name: str) -> str:
    files = sorted((RUNS / f"{name}-trl").glob("*/result.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    curves = [list(result["curve"].values()) for result in results]
    after = statistics.mean(curve[-1] for curve in curves)
    each = ", ".join(f"{curve[-1]:.3f}" for curve in curves)
    minutes = statistics.mean(result["minutes"] for result in results)
    return f"| {name} | {TRL[1]} | {curves[0][0]:.3f} → {after:.3f} | {each} | {minutes:.1f} |"


def rows(name: str) -> list[str]:
    """A line for each setting: held-out reward before, and after for each seed."""
    lines = []
    for setting in json.loads((RUNS / name / "sweep.json").read_text(encoding="utf-8"))["settings"]:
        after = setting["after"]
        each = ", ".join(f"{value:.3f}" for value in setting["runs"].values())
        trained = "control" if float(setting["values"]["learner.learning_rate"]) == 0 else "trained"
        interval = "" if after["low"] is None else f" ({after['low']:.3f} to {after['high']:.3f})"
        cells = [
            name,
            trained,
            f"{setting['before']:.3f} → {after['mean']:.3f}{interval}",
            each,
            f"{setting['minutes']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; none = the first two")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--trl", action="store_true", help="of openenv_tools: train with TRL, too")
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"no recipe {min(unknown)!r}; there are: {', '.join(RECIPES)}")
    if arguments.trl and arguments.recipes != ["openenv_tools"]:
        parser.error("TRL plays openenv_tools alone; write: curves.py openenv_tools --trl")
    for name in arguments.recipes or RECIPES[:2]:
        if not arguments.report:
            prepare(name)
            sweep(name, arguments.seeds)
            if arguments.trl:
                train_with_trl(name, arguments.seeds)
    print("\n| world | | held-out reward: start → mean | seeds | minutes of a run |\n|---|---|---|---|---|")
    for name in arguments.recipes or RECIPES[:2]:
        if (RUNS / name / "sweep.json").exists():
            print("\n".join(rows(name)))
        if any((RUNS / f"{name}-trl").glob("*/result.json")):
            print(row_of_trl(name))


if __name__ == "__main__":
    main()
