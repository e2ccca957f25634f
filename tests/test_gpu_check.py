"""The folder that checks a GPU machine: made here, run here on the CPU at tiny sizes. What it finds on a GPU nothing
here can say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_the_bundle_runs_all_its_checks_without_a_network(tmp_path: Path) -> None:
    bundle, version = tmp_path / "bundle", "{}.{}".format(*sys.version_info)
    make = [sys.executable, str(ROOT / "scripts/gpu_bundle.py"), str(bundle), "--python", version]
    subprocess.run(make, check=True)
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    environment = {
        **os.environ,
        **nowhere,
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHON": sys.executable,
    }
    ran = subprocess.run(
        [str(bundle / "run"), "--device", "cpu", "--quick"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "7 of 7 checks passed" in ran.stdout, ran.stdout + ran.stderr
    report = (bundle / "results/report.md").read_text()
    for figure in ("of the roofline, 8 rows", "MFU", "accuracy after", "tiny: seconds_learn", "passed"):
        assert figure in report
