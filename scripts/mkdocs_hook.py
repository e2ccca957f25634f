"""What the site needs of pages that are also read in the repository: titles of blocks, lists, links that leave docs/,
links to the glossary from the first use of its words, and a name for the search, which the theme gives none."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

TITLED = re.compile(r"^```(\w+) title=(\S+)$", re.MULTILINE)
BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
WITHIN_NUMBER = re.compile(r"^   (?=\S)", re.MULTILINE)
LEAVING = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)]+)\)")
GLOSSARY: Final = Path(__file__).resolve().parents[1] / "docs" / "glossary.md"
EVERYDAY: Final = frozenset({"Learner", "Outcome", "Reward", "Role", "Sample", "Step", "Store", "Task", "Worker"})
"""Words of the glossary that are understood without it."""
EXPLAINED: Final = ("index.md", "how-to/", "tutorials/", "explanation/")
"""Pages whose first uses are linked."""
PROSE: Final = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|^(?:#|\|| {4}|\s*```).*$", re.MULTILINE)
"""Everything that is no prose: code, links, markup, headings, tables."""


@cache
def glossary() -> dict[str, str]:
    """The words that are linked, each with its anchor."""
    titles = re.findall(r"^### (.+)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return {title: title.lower().replace(" ", "-") for title in titles if title not in EVERYDAY}


def link_words(markdown: str, to_glossary: str) -> str:
    """Link the first use of each word of the glossary in the page's prose."""
    blank = PROSE.sub(lambda found: " " * len(found[0]), BLOCK.sub(lambda block: " " * len(block[0]), markdown))
    places = []
    for title, anchor in glossary().items():
        word = title if title.isupper() else f"[{title[0]}{title[0].lower()}]{title[1:]}"
        if use := re.search(rf"(?<![\w/.-]){word}s?(?![\w/-])", blank):
            places.append((use.start(), use.end(), anchor))
    taken = len(markdown)
    for start, end, anchor in sorted(places, reverse=True):
        if end <= taken:  # "group size" is no "group"
            markdown = f"{markdown[:start]}[{markdown[start:end]}]({to_glossary}#{anchor}){markdown[end:]}"
            taken = start
    return markdown


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A block's title is quoted, as the theme asks; what belongs to a numbered point is indented by four; a link out of
    docs/ becomes its path in the repository."""
    if page.file.src_uri.startswith(EXPLAINED):
        markdown = link_words(markdown, "../" * page.file.src_uri.count("/") + "glossary.md")
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
