"""Words and sizes that our code keeps to: prints `file:line: breach` for each, and exits with 1 where there is one.

python scripts/check_words.py            packages/*/src, as `make check` does
python scripts/check_words.py PATH …     other files and folders

docstrings   begin with a verb or a noun phrase that could stand for the thing, never with one of `OPENERS`
names        say the type: `for choice in choices`, none of `NAMES`, except in a comprehension of one line
classes      are nouns of the field (`RunningServices`), no participles (`Served`)
sizes        lines of 120 columns, functions of 60 lines at most
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
OPENERS: Final = frozenset({"Of", "What", "Whether", "How", "Those", "Who", "By", "As", "It", "That"})
NAMES: Final = frozenset({"one", "found", "said", "told", "known", "kept"})
PARTICIPLE: Final = re.compile(
    r"_?(?:[A-Z][a-z]+ed|Begun|Done|Found|Given|Kept|Known|Left|Lost|Made|Said|Seen|Sent|Shown|Taken|Told)"
)
NOUNS: Final = frozenset({"Need", "Speed"})
"""Classes that look like participles."""
TO_RENAME: Final = frozenset({"Learned"})
"""Classes that are participles still; none is added, and who renames one takes it out."""
MOST_COLUMNS: Final = 120
MOST_LINES_OF_A_FUNCTION: Final = 60
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Breach:
    """A line that does not keep to the rules."""

    line: int
    what: str


def breaches(code: str) -> list[Breach]:
    """The breaches in a module's code, in the order of its lines."""
    tree, lines = ast.parse(code), code.splitlines()
    return sorted([*_sizes(tree, lines), *_docstrings(tree), *_names(tree), *_classes(tree)])


def _sizes(tree: ast.Module, lines: Sequence[str]) -> Iterator[Breach]:
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS:
            yield Breach(line=number, what=f"{len(line)} columns; at most {MOST_COLUMNS}")
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and (length := _length(node)) > MOST_LINES_OF_A_FUNCTION:
            yield Breach(line=node.lineno, what=f"{node.name} has {length} lines; at most {MOST_LINES_OF_A_FUNCTION}")


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstrings(tree: ast.Module) -> Iterator[Breach]:
    """Docstrings, of fields and constants too: each statement that is a string alone."""
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            continue
        first = node.value.value.split(None, 1)[:1]
        if first and first[0].strip(",.:;`") in OPENERS:
            yield Breach(line=node.lineno, what=f"a docstring begins with {first[0]!r}; begin with a verb or a noun")


def _names(tree: ast.Module) -> Iterator[Breach]:
    short = [node for node in ast.walk(tree) if isinstance(node, COMPREHENSIONS) and node.lineno == node.end_lineno]
    exempt = {name for node in short for generator in node.generators for name in ast.walk(generator.target)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in NAMES and node not in exempt:
            yield Breach(line=node.lineno, what=f"{name!r} does not say what it is; name the type")


def _classes(tree: ast.Module) -> Iterator[Breach]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and PARTICIPLE.fullmatch(node.name) and node.name not in NOUNS | TO_RENAME:
            yield Breach(line=node.lineno, what=f"class {node.name} is a participle; name it by a noun of the field")


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Python files, those of folders included."""
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> None:
    paths = [Path(word).resolve() for word in sys.argv[1:]] or sorted(ROOT.glob("packages/*/src"))
    count = 0
    for file in files_of(paths):
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        for breach in breaches(file.read_text(encoding="utf-8")):
            print(f"{name}:{breach.line}: {breach.what}")
            count += 1
    sys.exit(f"{count} breaches" if count else 0)


if __name__ == "__main__":
    main()
