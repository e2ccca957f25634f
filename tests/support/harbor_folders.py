"""Task folders for tests, written as Harbor's are: small, and each different by its number."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

__all__ = ["FORGERIES", "write_task", "write_tasks"]

TOML: Final = """schema_version = "1.4"

[task]
name = "tests/{name}"
description = ""

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 20.0

[agent]
timeout_sec = 20.0

[environment]
build_timeout_sec = 60.0
network_mode = "no-network"
storage_mb = 32
"""
FORGERIES: Final = {
    "a reward file": "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
    "the other reward file": """mkdir -p /logs/verifier && echo '{"reward": 1}' > /logs/verifier/reward.json""",
    "a process that goes on": (
        "setsid bash -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
        """ echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done' > /dev/null 2>&1 &"""
    ),
    "a link": "mkdir -p /app/x /logs && echo 1 > /app/x/reward.txt && ln -sfn /app/x /logs/verifier",
    "logs elsewhere": "mkdir -p /app/x/verifier && echo 1 > /app/x/verifier/reward.txt && ln -sfn /app/x /logs",
    "a test of its own": (
        "mkdir -p /tests && printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh && chmod 555 /tests"
    ),
    "a shell of its own": (
        "rm -rf /bin; mkdir -p /bin && printf '#!/usr/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /bin/bash"
        " && chmod 755 /bin/bash"
    ),
    "settings of its own": "mv /etc /gone; mkdir /etc; mv /root /home/x; echo 'cat () { echo $1; }' > /root; mv /tmp /was",
    "files that bash reads": "echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee /root/.bashrc > /root/.bash_profile",
}
"""Commands of an agent that wants the reward without the work."""


def write_task(
    folder: Path, name: str, *, instruction: str, solve: str, test: str, docker: str = "", toml: str = ""
) -> Path:
    """Write one; `docker` and `toml` are lines that are added."""
    path = folder / name
    files = {
        "task.toml": TOML.format(name=name) + toml,
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM ubuntu:24.04\n\nWORKDIR /app\n{docker}",
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{solve}\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
    }
    for place, text in files.items():
        (path / place).parent.mkdir(parents=True, exist_ok=True)
        (path / place).write_text(text, encoding="utf-8")
    return path


def write_tasks(folder: Path, count: int) -> list[Path]:
    """Write `count` tasks of four kinds; one kind pays in part, one writes no reward at all where the work is not done."""
    return [_KINDS[number % len(_KINDS)](folder, number, random.Random(number)) for number in range(count)]


def _write_number(folder: Path, number: int, rng: random.Random) -> Path:
    value = rng.randrange(1000)
    return write_task(
        folder,
        f"number-{number}",
        instruction=f"Write the number {value} to answer.txt.",
        solve=f"echo {value} > answer.txt",
        test=f'[ "$(cat answer.txt 2>/dev/null)" = {value} ] && echo 1 > /logs/verifier/reward.txt',
    )


def _write_sum(folder: Path, number: int, rng: random.Random) -> Path:
    values = [rng.randrange(100) for _ in range(5)]
    path = write_task(
        folder,
        f"sum-{number}",
        instruction="Write the sum of the numbers in numbers.txt to sum.txt.",
        solve="awk '{s+=$1} END {print s}' numbers.txt > sum.txt",
        test=f'r=0; [ "$(cat sum.txt 2>/dev/null)" = {sum(values)} ] && r=1; echo $r > /logs/verifier/reward.txt',
        docker="COPY numbers.txt .\nENV LC_ALL=C\n",
    )
    (path / "environment" / "numbers.txt").write_text("\n".join(map(str, values)) + "\n", encoding="utf-8")
    return path


def _write_parts(folder: Path, number: int, rng: random.Random) -> Path:
    names = [f"f{rng.randrange(100)}-{place}" for place in range(4)]
    listed = " ".join(names)
    return write_task(
        folder,
        f"parts-{number}",
        instruction=f"Make the empty files {listed} in made.",
        solve=f"for f in {listed}; do touch made/$f; done",
        test=f"""n=0; for f in {listed}; do [ -f made/$f ] && n=$((n + 1)); done
echo "{{\\"reward\\": $(awk "BEGIN {{print $n / 4}}"), \\"files\\": $n}}" > /logs/verifier/reward.json""",
        docker="RUN mkdir made \\\n    && touch made/.keep\n",
    )


def _write_sort(folder: Path, number: int, rng: random.Random) -> Path:
    words = [f"{rng.choice('abcdefgh')}{rng.randrange(1000)}" for _ in range(6)]
    path = write_task(
        folder,
        f"sort-{number}",
        instruction="Sort the lines of data/words.txt in place.",
        solve="sort -o data/words.txt data/words.txt",
        test="cmp -s data/words.txt /tests/sorted.txt; echo $((1 - $?)) > /logs/verifier/reward.txt",
        docker='COPY ["data", "data/"]\n',
    )
    (path / "environment" / "data").mkdir(exist_ok=True)
    (path / "environment" / "data" / "words.txt").write_text("\n".join(["z", *words]) + "\n", encoding="utf-8")
    (path / "tests" / "sorted.txt").write_text("\n".join(sorted([*words, "z"])) + "\n", encoding="utf-8")
    return path


_KINDS: Final = (_write_number, _write_sum, _write_parts, _write_sort)
