"""A project as pip would have it installed: its modules, and beside them what says its name and its entry points."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

__all__ = ["install_in_place", "write_blocks"]


def write_blocks(page: Path, folder: Path) -> None:
    """The titled blocks of a page, as files."""
    fence = re.compile(r"^```\w+ title=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for title, body in fence.findall(page.read_text(encoding="utf-8")):
        (folder / title).parent.mkdir(parents=True, exist_ok=True)
        (folder / title).write_text(body, encoding="utf-8")


def install_in_place(project: Path) -> Path:
    """Where its modules lie: on `sys.path`, or in `PYTHONPATH` of other processes, it is installed."""
    told = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = project / "src" / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n", encoding="utf-8"
    )
    points = "".join(f"{name} = {module}\n" for name, module in told["entry-points"]["lightningrl"].items())
    (folder / "entry_points.txt").write_text(f"[lightningrl]\n{points}", encoding="utf-8")
    return project / "src"
