"""The doctor's bill beside what the run then took: CPU minutes, and the most memory, of all processes and of each.

    python scripts/bill.py examples/calculator_smollm2 --set loop.steps=2
    python scripts/bill.py examples/calculator_smollm2 --set loop.steps=2 --set learner.lora=true
    python scripts/bill.py examples/calculator_smollm2/reasoning_gym.toml --set loop.steps=3 --set loop.tasks_per_step=3

Memory is the trainer's at its peak and what the others hold for themselves then, as the doctor counts it. The recipe is
examined before the run and after it: machines become slower and faster while they work. Bills are the mean of both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightningrl.machine import gigabytes


def lightningrl(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("lightningrl")), *words]


@dataclass(kw_only=True, slots=True)
class Process:
    """Use of one process so far."""

    role: str
    seconds: float = 0.0
    """CPU seconds of its own."""
    now: int = 0
    """Bytes."""
    peak: int = 0


def look(pid: int, seen: dict[int, Process], role: str = "trainer") -> None:
    """Look at a process and all that it started."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        words = (folder / "cmdline").read_text()
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return
    process = seen.setdefault(pid, Process(role=role))
    if "lightningrl_server" in words:
        process.role = "server"
    process.seconds = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    size = lines.get("VmHWM" if role == "trainer" else "RssAnon", "0 kB")
    process.now = 1024 * int(size.split()[0])
    process.peak = max(process.peak, process.now)
    for child in children:
        look(int(child), seen, "worker")


def watch(command: list[str]) -> tuple[float, int, dict[int, Process]]:
    """Run a command: CPU seconds and peak bytes of all processes together, and of each."""
    seen: dict[int, Process] = {}
    peak = 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        while run.poll() is None:
            for process in seen.values():
                process.now = 0  # of what has ended
            look(run.pid, seen)
            peak = max(peak, sum(process.now for process in seen.values()))
            time.sleep(0.1)
        log.seek(0)
        if run.returncode:
            sys.exit(log.read().decode(errors="replace")[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak, seen


def examine(words: list[str]) -> dict[str, Any]:
    """Examine a recipe and return its bill."""
    looked = subprocess.run(lightningrl("doctor", *words, "--json"), stdout=subprocess.PIPE)
    if not looked.stdout:
        sys.exit(looked.returncode)  # it has said why
    bill: dict[str, Any] = json.loads(looked.stdout)["bill"] or sys.exit(looked.stdout.decode())
    return bill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    words = [asked.recipe, *(f"--set={setting}" for setting in asked.settings)]
    bills = [examine(words)]
    with tempfile.TemporaryDirectory(prefix="lightningrl-bill-") as folder:
        seconds, peak, each = watch(lightningrl("train", *words, "--run", f"{folder}/run"))
    bills.append(examine(words))
    print(json.dumps(bills[0]["memory"], indent=1))
    cpu_minutes, memory = (fmean(bill[name] for bill in bills) for name in ("cpu_minutes", "memory_bytes"))
    ratios = cpu_minutes / (seconds / 60), memory / peak
    print(f"{'':20}{'CPU minutes':>12}{'memory':>10}")
    for when, bill in zip(("before", "after"), bills, strict=True):
        print(f"{f'billed {when}':20}{bill['cpu_minutes']:12.2f}{gigabytes(bill['memory_bytes']):>10}")
    print(f"{'measured':20}{seconds / 60:12.2f}{gigabytes(peak):>10}")
    print(f"{'billed ÷ measured':20}{ratios[0]:12.2f}{ratios[1]:10.2f}")
    for pid, process in each.items():
        print(f"  {f'{process.role} {pid}':18}{process.seconds / 60:12.2f}{gigabytes(process.peak):>10}")


if __name__ == "__main__":
    main()
