"""`lightningrl certify` on a run that a test has just made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warm import WarmCommand

__all__ = ["certified"]


def certified(run: Path, warm: WarmCommand) -> dict[str, Any]:
    """The certificate's numbers. Fails where a check does, or where no token could be looked at."""
    ran = warm.run("lightningrl", "certify", str(run), "--json", cwd=run.parent)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["recomputed"] > 0, found["checks"]
    return found
