"""Checks the English of tutorials and how-tos: prints `file:line: breach` for each, counts them, and exits with 1 where
there is one.

python scripts/check_pages.py            docs/tutorials and docs/how-to, as `make check` does
python scripts/check_pages.py PATH …     other pages and folders

sentences    at most 30 words
table cells  at most 120 characters, as they are read (a link is its words); a command that fills its cell
             is copied, not read
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CHECKED: Final = ("docs/tutorials", "docs/how-to")
MOST_WORDS: Final = 30
MOST_CHARACTERS: Final = 120
BLOCK: Final = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
PICTURE: Final = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
CODE: Final = re.compile(r"`[^`]+`")
ITEM: Final = re.compile(r" *(?:[-*+]|\d+\.) ")
END: Final = re.compile(r"(?<=[.!?])[)\"'*_]*\s+")
ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|No|Fig|eq)\.")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Breach:
    """A sentence or a cell that is too long."""

    line: int
    what: str


def breaches(text: str) -> list[Breach]:
    """The breaches of a page, in the order of its lines."""
    return sorted(_breaches(text))


def _breaches(text: str) -> Iterator[Breach]:
    blank = COMMENT.sub(_lines_alone, BLOCK.sub(_lines_alone, text))
    paragraph: list[str] = []
    first = 1
    for number, line in enumerate([*blank.splitlines(), ""], 1):
        is_table = line.lstrip().startswith("|")
        stands_alone = not line.strip() or is_table or line.startswith(("#", "    ", "<"))
        if (stands_alone or ITEM.match(line)) and paragraph:
            yield from _long_sentences(" ".join(paragraph), first)
            paragraph = []
        if is_table:
            yield from _long_cells(line, number)
        elif not stands_alone:
            first = first if paragraph else number
            paragraph.append(ITEM.sub("", line, count=1).strip())


def _lines_alone(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _long_sentences(paragraph: str, line: int) -> Iterator[Breach]:
    for sentence in sentences(paragraph):
        if (count := len(sentence.split())) > MOST_WORDS:
            yield Breach(line=line, what=f"a sentence of {count} words; at most {MOST_WORDS}: {sentence[:60]}…")


def _long_cells(line: str, number: int) -> Iterator[Breach]:
    for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
        if not CODE.fullmatch(cell.strip()) and (count := len(as_read(cell).strip())) > MOST_CHARACTERS:
            yield Breach(line=number, what=f"a cell of {count} characters; at most {MOST_CHARACTERS}")


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences, as they are read. Code counts as one word."""
    text = CODE.sub(lambda code: code[0].replace(" ", "\u00a0").replace(".", "\u2024"), as_read(paragraph, code=True))
    text = ABBREVIATION.sub("\\1\u2024", text)
    return [sentence for part in END.split(text) if (sentence := part.replace("\u00a0", "_").strip())]


def as_read(text: str, *, code: bool = False) -> str:
    """Text without links' addresses, pictures and marks; with `code` its backticks stay."""
    plain = LINK.sub(r"\1", PICTURE.sub("", text)).replace("**", "")
    return plain if code else plain.replace("`", "")


def pages_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Markdown files, those of folders included."""
    for path in paths:
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def main() -> None:
    paths = [Path(word).resolve() for word in sys.argv[1:]] or [ROOT / name for name in CHECKED]
    count = pages = 0
    for page in pages_of([path for path in paths if path.exists()]):
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        pages += 1
        for breach in breaches(page.read_text(encoding="utf-8")):
            print(f"{name}:{breach.line}: {breach.what}")
            count += 1
    if count:
        sys.exit(f"{count} breaches in {pages} pages")


if __name__ == "__main__":
    main()
