"""Trains each recipe of this folder over seeds, beside a control at learning rate 0, and prints the table of
docs/reference/results.md.

    python examples/worlds/curves.py                          the first two
    python examples/worlds/curves.py openenv --seeds 3        one of them
    python examples/worlds/curves.py --report                 the table of what is there

It makes what a recipe needs: starting policies, task folders, and openenv's environment
(`make .venv-openenv/.installed`). Each is one `lightningrl sweep` in runs/worlds, which goes on where it was stopped.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs" / "worlds"
RECIPES = ("openenv", "harbor", "reasoning_gym")


def prepare(name: str) -> None:
    """Make what the recipe needs and what is not there."""
    starter = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["policy"]["model"]
    if not starter.startswith("package:") and not (HERE / starter / "config.json").exists():
        subprocess.run([sys.executable, "starters.py", starter], cwd=HERE, check=True)
    if name == "harbor" and not (HERE / "folders").exists():
        subprocess.run([sys.executable, "task_folders.py"], cwd=HERE, check=True)
    if name == "openenv":
        subprocess.run(["make", "-s", ".venv-openenv/.installed"], cwd=ROOT, check=True)


def sweep(name: str, seeds: int) -> None:
    rate = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["learner"]["learning_rate"]
    command = [str(Path(sys.executable).with_name("lightningrl")), "sweep", str(HERE / f"{name}.toml")]
    command += ["--seeds", str(seeds), "--set", f"learner.learning_rate={rate},0", "--sweep", str(RUNS / name)]
    subprocess.run(command, cwd=ROOT, check=True)


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
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"no recipe {min(unknown)!r}; there are: {', '.join(RECIPES)}")
    for name in arguments.recipes or RECIPES[:2]:
        if not arguments.report:
            prepare(name)
            sweep(name, arguments.seeds)
    print("\n| world | | held-out reward: start → mean | seeds | minutes of a run |\n|---|---|---|---|---|")
    for name in arguments.recipes or RECIPES[:2]:
        if (RUNS / name / "sweep.json").exists():
            print("\n".join(rows(name)))


if __name__ == "__main__":
    main()
