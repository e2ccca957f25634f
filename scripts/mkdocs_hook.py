"""What the site needs of pages that are also read in the repository: titles of blocks, lists, and links that leave
docs/; and a name for the search, which the theme gives none."""

from __future__ import annotations

import re
from typing import Any

TITLED = re.compile(r"^```(\w+) title=(\S+)$", re.MULTILINE)
BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
WITHIN_NUMBER = re.compile(r"^   (?=\S)", re.MULTILINE)
LEAVING = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A block's title is quoted, as the theme asks; what belongs to a numbered point is indented by four; a link out of
    docs/ becomes its path in the repository."""
    parts = BLOCK.split(markdown)  # text, block, text, …
    parts[::2] = [WITHIN_NUMBER.sub("    ", part) for part in parts[::2]]
    titled = TITLED.sub(r'```\1 title="\2"', "".join(parts))
    below = page.file.src_uri.count("/")
    return LEAVING.sub(
        lambda link: link[0] if link[0].count("../") <= below else f"{link[1]} (`{link[2]}` in the repository)", titled
    )


def on_post_page(output: str, **_: Any) -> str:
    """The search is a dialog, and a screen reader says the name of one."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
