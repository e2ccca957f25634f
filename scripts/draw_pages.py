"""Draw the pictures of docs/how-to/viewing.md from a run of examples/text_to_sql, in Chromium.

python scripts/draw_pages.py runs/text_to_sql-…
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "viewing"
PICTURES: tuple[tuple[str, str, Literal["light", "dark"], int], ...] = (
    ("run", "/", "light", 1280),
    ("rollouts", "/rollouts?mode=train&reward=0.0&peek=ROLLOUT", "light", 1280),
    ("rollouts-dark", "/rollouts?role=rewrite", "dark", 1280),
    ("rollout", "/rollouts/ROLLOUT", "light", 1280),
    ("tokens", "/rollouts/ROLLOUT?view=tokens", "light", 1280),
    ("group", "/groups/GROUP", "light", 1280),
    ("credit", "/credit?group=GROUP", "light", 1280),
    ("phone", "/", "light", 390),
)
"""Name, address, colours, width."""


def main() -> None:
    command = [sys.executable, "-m", "lightningrl", "view", sys.argv[1], "--no-browser"]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        link = re.findall(r"http://\S+", viewer.stdout.readline())[0]
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, path, colours, width in PICTURES:
                page = chromium.new_page(viewport={"width": width, "height": 780}, color_scheme=colours)
                page.goto(link)
                url = link.partition("/?key=")[0]
                if "ROLLOUT" in path or "GROUP" in path:
                    page.goto(f"{url}/rollouts?mode=train&reward=0.0")
                    rollout = page.locator("tr[data-row] a[data-open]").nth(2).inner_text()
                    path = path.replace("ROLLOUT", rollout).replace("GROUP", rollout.partition("-")[0])
                page.goto(url + path)
                page.screenshot(path=FOLDER / f"{name}.png")
                with Image.open(FOLDER / f"{name}.png") as picture:
                    small = picture.convert("RGB").quantize(256)
                small.save(FOLDER / f"{name}.png", optimize=True)
                page.close()
    finally:
        viewer.terminate()
        viewer.wait()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    main()
