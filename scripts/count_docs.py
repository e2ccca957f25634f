"""Counts the documentation: words by page and by kind, the share of lines that belong to tables, the total.

python scripts/count_docs.py            the kinds and the total
python scripts/count_docs.py --pages    each page, too

Words are those of `wc -w` in README.md and docs/**/*.md, blocks of code and the bars of tables included. Pages that
scripts write from the code stand in the repository and are counted as *generated*. What mkdocstrings adds to the page
of the Python API while the site is built is in no file, and is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST_WORDS: Final = 56_000
"""Words of all pages that people write. Generated pages are for looking things up, and grow with the program."""
MOST_TABLE_SHARE: Final = 0.104
"""Half of what stood in tables (20.9 % of lines) at commit a9f3c14b."""
GENERATED: Final = frozenset(
    {
        "docs/troubleshooting.md",
        "docs/reference/commands.md",
        "docs/reference/models.md",
        "docs/reference/recipe.md",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCount:
    """A page's size."""

    name: str
    words: int
    lines: int
    table_lines: int

    @property
    def kind(self) -> str:
        """`generated`, or the folder of docs/ that the page stands in; `start` for README and what stands in none."""
        folders = self.name.split("/")[1:-1]
        return "generated" if self.name in GENERATED else folders[0] if folders else "start"


def count_page(path: Path) -> PageCount:
    """The size of a page below the repository's root."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return PageCount(
        name=path.relative_to(ROOT).as_posix(),
        words=len(text.split()),
        lines=len(lines),
        table_lines=sum(line.lstrip().startswith("|") for line in lines),
    )


def count_pages() -> list[PageCount]:
    """README and every page of docs/, sorted by name."""
    return [count_page(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]


def table_share(pages: list[PageCount]) -> float:
    """Lines of tables ÷ all lines."""
    return sum(page.table_lines for page in pages) / sum(page.lines for page in pages)


def main() -> None:
    pages = count_pages()
    if "--pages" in sys.argv[1:]:
        for page in sorted(pages, key=lambda page: page.words):
            print(f"{page.words:7,}  {page.table_lines:4} of {page.lines:4} lines  {page.name}")
    kinds: Counter[str] = Counter()
    for page in pages:
        kinds[page.kind] += page.words
    for kind, words in kinds.most_common():
        print(f"{words:7,}  {kind}")
    print(f"{kinds.total():7,}  words; tables have {table_share(pages):.1%} of the lines")


if __name__ == "__main__":
    main()
