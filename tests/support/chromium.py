"""The browser that tests of the viewer's pages look with: Debian's Chromium, driven by Playwright (`make
test-browser`)."""

from __future__ import annotations

import shutil
from typing import Any, Final

import pytest

_PATH: Final = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
LAUNCH: Final[dict[str, Any]] = {"executable_path": _PATH, "args": ["--no-sandbox"]}
"""For `playwright.chromium.launch`, of either kind."""
needs_chromium = pytest.mark.skipif(_PATH is None, reason="there is no Chromium: apt-get install chromium")
