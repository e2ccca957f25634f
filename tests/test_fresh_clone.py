"""README's lines run in a fresh clone: with an empty cache, as another user than root where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
HOUR_S = 3600


def can_run(python: str, who: dict[str, Any]) -> bool:
    try:
        return subprocess.run([python, "-c", "import venv, ensurepip"], check=False, cwd="/", **who).returncode == 0
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_what_readme_types_first_runs_in_a_fresh_clone(version: str, tmp_path: Path) -> None:
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    found = [shutil.which(f"python{version}", path=path) for path in ("/usr/bin:/usr/local/bin", os.environ["PATH"])]
    pythons = [python for python in found if python is not None]
    python, who = next(
        ((python, user) for user in (who, {}) for python in pythons if can_run(python, user)), (sys.executable, {})
    )
    if f"{sys.version_info.major}.{sys.version_info.minor}" != version and python == sys.executable:
        pytest.skip(f"no Python {version} with venv and pip here")
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", tmp_path / "clone"], check=True)
    (tmp_path / "home").mkdir()
    if who:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", tmp_path], check=True)
        for folder in tmp_path.parents[:3]:
            folder.chmod(folder.stat().st_mode | 0o011)
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "UV_CACHE_DIR", "XDG_CACHE_HOME", "LIGHTNINGRL_LONG"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHON": python}

    def type_line(line: str) -> None:
        ran = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path / "clone",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=HOUR_S,
            **who,
        )
        assert ran.returncode == 0, f"{line}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"

    blocks = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks[0] == "make quickstart\n" and blocks[1] == "make test\n"
    type_line("make quickstart")
    type_line(" && ".join(line for block in blocks[2:] for line in block.splitlines()))
    assert (tmp_path / "clone" / "my-weights" / "model.safetensors").is_file()
