"""Writes docs/troubleshooting.md: every message of the program (scripts/messages.py) below its cause and command, which
stand in scripts/troubleshooting.toml.

python scripts/make_troubleshooting.py            writes the page
python scripts/make_troubleshooting.py --check    fails where it would be another, and says which messages are new
"""

from __future__ import annotations

import html
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from messages import Message, collect

ROOT: Final = Path(__file__).resolve().parents[1]
ENTRIES: Final = ROOT / "scripts" / "troubleshooting.toml"
PAGE: Final = ROOT / "docs" / "troubleshooting.md"
MOST_WORDS: Final = 6
"""Words of a message on the page: by its beginning one finds it."""
FEWEST_WORDS: Final = 3
CUT: Final = "…"
HEAD: Final = """# Troubleshooting

Search this page for the first words of your message: above them stand its cause and a command.
No message? Ask the doctor.

```text
lightningrl doctor RECIPE
```

`⟨…⟩` stands for what a run fills in, `…` for the rest of the sentence, which says what to do next.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A cause that messages share, with its command."""

    theme: str
    title: str
    cause: str
    run: str
    """A command line that mends it, or shows more."""
    see: str
    """A page below docs/."""
    match: tuple[str, ...]
    """`module`, or `module :: regular expression`; `*` in a module stands for anything."""

    def fits(self, message: Message, *, by_words: bool) -> bool:
        for pattern in self.match:
            module, split, words = pattern.partition(" :: ")
            if bool(split) is by_words and fnmatchcase(message.module, module) and re.search(words, message.text):
                return True
        return False


def read_entries() -> list[Entry]:
    """The entries, in the order of the page."""
    rows = tomllib.loads(ENTRIES.read_text(encoding="utf-8"))["entry"]
    return [Entry(**{**row, "match": tuple(row["match"])}) for row in rows]


def place(message: Message, entries: Sequence[Entry]) -> Entry | None:
    """The entry that a message stands under: first by its words, then by its module."""
    fitting = (entry for by_words in (True, False) for entry in entries if entry.fits(message, by_words=by_words))
    return next(fitting, None)


def homeless(messages: Sequence[Message], entries: Sequence[Entry]) -> list[str]:
    """A sentence for each message without an entry."""
    return [
        f"{message.module}: {message.text!r} has no entry; add its module or words to `match` of an entry in "
        f"{ENTRIES.relative_to(ROOT)}, or an entry with its cause and command"
        for message in messages
        if place(message, entries) is None
    ]


def beginning(text: str) -> str:
    """A message up to what it says to do next, six words at most."""
    said = re.split(r"; | \(", text)[0]
    words = said.split()
    shown = " ".join(words[:MOST_WORDS])
    return shown if shown == text else shown.rstrip(",:;") + CUT


def beginnings(texts: Iterable[str]) -> list[str]:
    """The beginnings of messages, sorted; those that share their first three words of their own are one."""
    alike: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        words = text.split()
        shared = next((at for at in (3, 4) if sum("⟨" not in word for word in words[:at]) >= FEWEST_WORDS), len(words))
        alike[" ".join(words[:shared])].add(beginning(text))
    return sorted(
        {next(iter(shown)) if len(shown) == 1 else words.rstrip(",:;") + CUT for words, shown in alike.items()}
    )


def unseen(messages: Iterable[Message], text: str) -> list[Message]:
    """The messages whose beginning a page's text does not have."""
    shown = tuple({html.unescape(item).removesuffix(CUT) for item in re.findall(r"^<li>(.*)$", text, re.MULTILINE)})
    return [message for message in messages if not message.text.startswith(shown)]


def page(messages: Sequence[Message], entries: Sequence[Entry]) -> str:
    """The page's text."""
    placed: dict[str, set[str]] = defaultdict(set)
    for message in messages:
        if entry := place(message, entries):
            placed[entry.title].add(message.text)
    lines = [HEAD]
    theme = ""
    for entry in entries:
        if entry.theme != theme:
            theme = entry.theme
            lines += [f"## {theme}", ""]
        texts = beginnings(placed[entry.title])
        lines += [f"### {entry.title}", "", f"{entry.cause} [More]({entry.see}).", "", "```text", entry.run, "```", ""]
        lines += ["<details><summary>Messages</summary><ul>"]
        lines += [f"<li>{html.escape(text, quote=False)}" for text in texts]
        lines += ["</ul></details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with `--check` compare it. Returns the exit status."""
    messages, entries = collect(), read_entries()
    if missing := homeless(messages, entries):
        print("\n".join(missing))
        return 1
    text = page(messages, entries)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    stands = PAGE.read_text(encoding="utf-8")
    if stands == text:
        return 0
    for message in unseen(messages, stands):
        entry = place(message, entries)
        print(f"{message.module}: {message.text!r} is new and would stand under {entry and entry.title!r}")
    print(
        f"{PAGE.relative_to(ROOT)} is not current; run: python scripts/make_troubleshooting.py (a new message with "
        f"another cause first gets an entry in {ENTRIES.relative_to(ROOT)})"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
