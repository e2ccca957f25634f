"""What a start costs: `import lightningrl`, the list of plugins, a server until it answers, the check of an agent.

python benchmarks/import_time.py                     this tree
python benchmarks/import_time.py --beside ../other   this tree and another, by turns: their ratio
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from earlier import ENVIRONMENT, ROOT

STARTER = ROOT / "examples" / "text_to_sql" / "starter"
CODE = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
RUNS = 7


def seconds(statement: str, runs: int = RUNS) -> float:
    timed = [
        float(subprocess.run([sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True).stdout)
        for _ in range(runs)
    ]
    return statistics.median(timed)


def start_server(environment: Mapping[str, str]) -> float:
    """CPU seconds of a server process until it answers."""
    with tempfile.TemporaryDirectory() as folder:
        policy = {"policy": {"model": str(STARTER)}}
        settings = {"store_url": f"sqlite:///{folder}/store.sqlite", "run_key": "a-key-of-this-run", "policies": policy}
        command = [sys.executable, "-m", "lightningrl.server"]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write(json.dumps(settings).encode() + b"\n")
            server.stdin.flush()
            assert b"url" in server.stdout.readline()
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            server.stdin.close()
            return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def check_agent(environment: Mapping[str, str]) -> float:
    """CPU seconds of the process that imports an agent, for one that imports nothing."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agent.py").write_text("def answer(task): return task\n")
        command = [sys.executable, "-m", "lightningrl.training.agent_check", "agent.py:answer", folder]
        checking = subprocess.Popen(command, env=environment)
        _, status, used = os.wait4(checking.pid, 0)
        checking.returncode = status
        assert status == 0
        return used.ru_utime + used.ru_stime


def by_turns(measure: Callable[[Mapping[str, str]], float], trees: list[Path]) -> list[list[float]]:
    environments = [{**ENVIRONMENT, "PYTHONPATH": str(tree / "packages" / "core" / "src")} for tree in trees]
    return [list(tree) for tree in zip(*([measure(environment) for environment in environments] for _ in range(RUNS)), strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", type=Path, help="another checkout; it runs in this one's environment")
    beside = parser.parse_args().beside
    print(f"listing plugins      {seconds('from lightningrl.plugins import load_plugins; load_plugins()'):.3f} s")
    for name, measure in (("server until it answers", start_server), ("check of an agent", check_agent)):
        here, *other = by_turns(measure, [ROOT, *([beside.resolve()] if beside else [])])
        ratio = f", {min(here) / min(other[0]):.2f} of {min(other[0]):.2f} there" if other else ""
        print(f"{name:<24} {min(here):.2f} s CPU, the least of {RUNS}{ratio}")
    print(f"RESULT {seconds('import lightningrl'):.4f} s to import lightningrl")
