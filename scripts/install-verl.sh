#!/bin/sh
# Make .venv-verl with everything that packages/trainer-verl/cpu/uv.lock names: verl, Ray and vLLM on a Linux machine without a GPU.
# Needs Python 3.11 or 3.12 with pip, nothing else; 3 GB.
set -eu
cd "$(dirname "$0")/.."
TORCH=2.13.0

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.11 test-verl" >&2; exit 1; }

[ -x .venv-verl/bin/python ] || "$python" -m venv .venv-verl
.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
export VIRTUAL_ENV="$PWD/.venv-verl"

# uv does not read pip's settings: hand it the folder of wheels that pip would look in, if there is one.
links=${PIP_FIND_LINKS:-$(.venv-verl/bin/python -m pip config get global.find-links 2>/dev/null || true)}

# From here on in the package's folder: the root's uv settings are not this environment's.
cd packages/trainer-verl/cpu
uv=../../../.venv-verl/bin/uv
if ! ../../../.venv-verl/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$TORCH+cpu')" 2>/dev/null; then
    if [ -n "$links" ] && ls "$links"/torch-"$TORCH"+cpu-* >/dev/null 2>&1; then
        $uv pip install --quiet --find-links "$links" "torch==$TORCH+cpu"
    else
        $uv pip install --quiet --torch-backend cpu "torch==$TORCH"
    fi
fi
# Without bytecode every process of vLLM compiles it again: 20 s for an import instead of 7 s.
$uv export --quiet --frozen --all-groups --no-hashes --prune torch | $uv pip install --quiet --no-deps --compile-bytecode -r -
touch ../../../.venv-verl/.installed
