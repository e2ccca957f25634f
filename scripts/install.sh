#!/bin/sh
# Make .venv with everything that uv.lock names; on a machine without an NVIDIA GPU torch comes as its small CPU build.
# Needs Python 3.11–3.13 with pip, nothing else.
set -eu
cd "$(dirname "$0")/.."
TORCH=2.13.0

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.12 python3.13 python3.11 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "no Python 3.11, 3.12 or 3.13 found; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }

[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
export VIRTUAL_ENV="$PWD/.venv"
uv=.venv/bin/uv

# uv does not read pip's settings: hand it the folder of wheels that pip would look in, if there is one.
links=${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}
tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH')" 2>/dev/null; then
    if [ -n "$links" ] && ls "$links"/torch-"$TORCH+cpu-$tag"-* >/dev/null 2>&1 && ! command -v nvidia-smi >/dev/null; then
        $uv pip install --quiet --find-links "$links" "torch==$TORCH+cpu"
    else
        $uv pip install --quiet --torch-backend auto "torch==$TORCH"
    fi
fi
$uv export --quiet --frozen --all-groups --no-group browser --no-hashes --prune torch | $uv pip install --quiet -r -
touch .venv/.installed
