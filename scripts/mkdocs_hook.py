"""What the site needs of pages that are also read in the repository: titles of blocks, and links that leave docs/."""

from __future__ import annotations

import re
from typing import Any

TITLED = re.compile(r"^```(\w+) title=(\S+)$", re.MULTILINE)
LEAVING = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A block's title stands above it, for Markdown has no place for it; a link out of docs/ becomes its path in the repository."""
    titled = TITLED.sub(r"`\2`\n\n```\1", markdown)
    below = page.file.src_uri.count("/")
    return LEAVING.sub(lambda link: link[0] if link[0].count("../") <= below else f"{link[1]} (`{link[2]}` in the repository)", titled)
