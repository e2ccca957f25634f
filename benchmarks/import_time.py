"""How long `import lightningrl` takes in a fresh interpreter, and with it the list of plugins."""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def seconds(statement: str, runs: int = 7) -> float:
    timed = [
        float(subprocess.run([sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True).stdout)
        for _ in range(runs)
    ]
    return statistics.median(timed)


if __name__ == "__main__":
    print(f"listing plugins      {seconds('from lightningrl.plugins import load_plugins; load_plugins()'):.3f} s")
    print(f"RESULT {seconds('import lightningrl'):.4f} s to import lightningrl")
