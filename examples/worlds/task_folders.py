"""Task folders in Harbor's format, of three kinds: a file, a folder, a word in a file. Names of validation are in no
other split.

    python task_folders.py          writes folders/train and folders/validation
"""

from pathlib import Path

__all__ = ["COMMANDS", "NAMES", "instruction_of", "write_folders"]

TRAIN = """
apple birch cedar daisy elder fern grape hazel iris juniper kiwi lemon maple nettle olive pear quince rose sage thyme
"""
HELD_OUT = "acorn beet clover dill fig gorse heath ivy larch mint"
NAMES = {"train": TRAIN.split(), "validation": HELD_OUT.split()}
COMMANDS = {"file": "touch {}", "folder": "mkdir {}", "word": "echo {0} > {0}"}
"""The command that does a task, by its kind."""
INSTRUCTIONS = {
    "file": "Make the empty file {}.",
    "folder": "Make the folder {}.",
    "word": "Write {0} into the file {0}.",
}
TESTS = {"file": "[ -f {0} ] && [ ! -s {0} ]", "folder": "[ -d {0} ]", "word": '[ "$(cat {0})" = {0} ]'}
TOML = """schema_version = "1.4"

[task]
name = "folders/{}"
description = ""

[environment]
network_mode = "no-network"
storage_mb = 16
"""


def instruction_of(kind: str, name: str) -> str:
    return INSTRUCTIONS[kind].format(name)


def write_folders(place: Path) -> None:
    """Write each kind's task for each name, in `train` and `validation`."""
    for split, names in NAMES.items():
        for name in names:
            for kind in COMMANDS:
                test = f"cd /app; {TESTS[kind].format(name)} && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
                files = {
                    "task.toml": TOML.format(f"{kind}-{name}"),
                    "instruction.md": instruction_of(kind, name),
                    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
                    "solution/solve.sh": f"#!/bin/bash\n{COMMANDS[kind].format(name)}\n",
                    "tests/test.sh": f"#!/bin/bash\n{test}\n",
                }
                for path, text in files.items():
                    file = place / split / f"{kind}-{name}" / path
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_folders(Path(__file__).parent / "folders")
