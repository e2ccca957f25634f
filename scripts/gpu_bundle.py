"""Make one folder that checks the torch backend on a GPU machine without a network.

scripts/gpu-check gpu-bundle                here: needs a package registry, no GPU
scp -r gpu-bundle there:                    to a machine with a PyTorch image
ssh there gpu-bundle/run                    there: needs no network; results/report.md says all

wheels/           what a bare PyTorch image lacks, for each Python asked for, and ours
requirements-*    their names, by Python
tree/             tests, the text-to-SQL example, scripts/gpu_check.py
run               makes an environment over the image's torch and runs everything; --quick, --device cpu, --only engine
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[1]
IN_IMAGE: Final = ("torch",)
"""With what it depends on: the image's own is used, whatever its version."""
NOT_NEEDED: Final = (
    *(
        "anthropic",
        "autogen-agentchat",
        "autogen-ext",
        "bm25s",
        "datasets",
        "import-linter",
        "ipykernel",
        "math-verify",
        "mkdocs",
        "mypy",
    ),
    *(
        "nbclient",
        "ollama",
        "omegaconf",
        "openinference-instrumentation-langchain",
        "openinference-instrumentation-openai",
        "psycopg",
    ),
    *(
        "pydantic-ai-slim",
        "pymdown-extensions",
        "ruff",
        "tensorboard",
        "tensordict",
        "types-pyyaml",
        "types-requests",
        "verl",
        "xllamacpp",
    ),
)
TREE: Final = (
    "conftest.py",
    "pyproject.toml",
    "tests/support",
    "packages/trainer-torch/tests",
    "examples/text_to_sql",
    "examples/calculator_smollm2",
    "scripts/gpu_check.py",
)
RUN: Final = """\
#!/bin/sh
# Check this machine: ./run [--device cpu] [--quick] [--only suite engine learner quantized vllm text_to_sql calculator_smollm2 whole_step]. No network is needed.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
fail() { echo "$1" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ -f "requirements-$version.txt" ] || fail "no wheels for Python $version here; make the bundle with --python $version"
"$python" -c 'import torch' || fail "this Python has no torch; run in a PyTorch image, or name its Python: PYTHON=/path/to/python $0"
if [ ! -f env/.installed ]; then
    "$python" -m venv --clear env
    env/bin/python -m pip install --quiet --no-index --no-deps --find-links wheels -r "requirements-$version.txt"
    # The image's packages come after ours, torch among them. A venv's own switch for this sees nothing where the image is a venv.
    ours=$(env/bin/python -c 'import site; print(site.getsitepackages()[0])')
    "$python" -c 'import site; print("\\n".join(site.getsitepackages()))' > "$ours/image.pth"
    touch env/.installed
fi
exec env/bin/python tree/scripts/gpu_check.py --out results "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12"], help="of the images that it is for")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{str(folder)!r} is not empty; name a new folder")
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run(
        [uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(wheels), str(ROOT)], check=True
    )
    (wheels / ".gitignore").unlink(missing_ok=True)
    ours = sorted(f"{wheel.name.split('-')[0].replace('_', '-')}" for wheel in wheels.glob("*.whl"))
    for version in options.python:
        names = requirements(uv, version)
        (folder / f"requirements-{version}.txt").write_text("\n".join([*names, *ours]) + "\n")
        print(f"fetching {len(names)} wheels for Python {version} …", flush=True)
        download(names, version, wheels)
    with tarfile.open(fileobj=io.BytesIO(archive())) as tree:
        tree.extractall(folder / "tree", filter="data")
    (folder / "run").write_text(RUN)
    (folder / "run").chmod(0o755)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"made {str(folder)!r}, {size / 1e6:.0f} MB; copy it to the GPU machine and start its `run`")


def requirements(uv: str, version: str) -> list[str]:
    """What uv.lock names for Linux and this Python, without what the image has and what no check needs."""
    pruned = [word for name in (*IN_IMAGE, *NOT_NEEDED) for word in ("--prune", name)]
    command = [
        uv,
        "export",
        "--quiet",
        "--frozen",
        "--no-emit-workspace",
        "--no-hashes",
        "--no-annotate",
        "--no-header",
        *pruned,
    ]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    machine = {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    machine |= {
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    asked = [Requirement(line) for line in said.splitlines() if line and not line.startswith("-e")]
    return [f"{one.name}{one.specifier}" for one in asked if one.marker is None or one.marker.evaluate(machine)]


def download(names: list[str], version: str, wheels: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(wheels),
    ]
    command += [
        "--python-version",
        version,
        "--implementation",
        "cp",
        "--abi",
        f"cp{version.replace('.', '')}",
        "--abi",
        "abi3",
    ]
    command += ["--abi", "none"]
    for glibc in (
        "manylinux_2_34",
        "manylinux_2_31",
        "manylinux_2_28",
        "manylinux_2_27",
        "manylinux_2_17",
        "manylinux2014",
        "manylinux_2_12",
        "manylinux2010",
        "manylinux_2_5",
    ):
        command += ["--platform", f"{glibc}_x86_64"]
    subprocess.run([*command, "--platform", "any", *names], check=True)


def archive() -> bytes:
    """What is committed of the tree."""
    return subprocess.run(["git", "archive", "HEAD", *TREE], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
