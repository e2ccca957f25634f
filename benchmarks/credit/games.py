"""Three small games whose agent says one word a turn, so that every future can be counted.

    start(case) ─► state ─► observe ─► the model's word ─► act ─► state … ─► None, and the outcome (1 = won, 0 = lost)

| game    | turns | what it has |
|---------|-------|-------------|
| `guess` | 3     | a number, as GEM's GuessTheNumber (arXiv 2510.01051): each guess tells something |
| `sql`   | 3–5   | table, column, condition of a query that SQLite runs after each word; errors may be repaired |
| `door`  | 16    | fetch a key, open a door; nothing is paid before; every other turn asks what does not matter |

What the model sees depends on the state alone, the time left aside. A token that is none of the game's words is the
word `None`: each game says what comes of it (the turn is lost). Nothing is random but the words, so a state's value is
a finite sum.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from lightningrl.types import ToolStatus

__all__ = ["GAMES", "Case", "Door", "Game", "Guess", "Sql", "State", "Step", "observations", "walk"]

Case = Mapping[str, Any]
"""What one task is about (JSON)."""
State = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What came of a word."""

    state: State | None
    """None = the game is over."""
    outcome: float = 0.0
    """Of a game that is over: 1.0 = won."""
    tool: str | None = None
    """The tool that the word called; None = it called none."""
    status: ToolStatus = ToolStatus.OK
    """Of the tool."""
    result: str = ""


class Game(Protocol):
    """One kind of task."""

    name: str
    words: tuple[str, ...]
    """All that can be said; each is one token."""

    def cases(self) -> Sequence[Case]:
        """All tasks, in an order that never changes."""
        ...

    def is_held_out(self, case: Case) -> bool:
        """Whether nobody learns from it."""
        ...

    def start(self, case: Case) -> State: ...

    def observe(self, case: Case, state: State) -> str:
        """What the model is told."""
        ...

    def act(self, case: Case, state: State, word: str | None) -> Step: ...

    def sensible(self, case: Case, state: State) -> Sequence[str]:
        """What somebody who knows which words are words might say here."""
        ...

    def best(self, case: Case, state: State) -> str:
        """What somebody says who sees what the model sees, and plays well."""
        ...


class Guess:
    """Which number? Told what it lies between, one narrows it down by three guesses. Of seven numbers, halving finds
    each."""

    name = "guess"
    numbers: Final = 9
    width: Final = 7
    guesses: Final = 3
    words: tuple[str, ...] = tuple(map(str, range(1, numbers + 1)))

    def cases(self) -> Sequence[Case]:
        starts = range(1, self.numbers - self.width + 2)
        return [
            {"low": low, "high": low + self.width - 1, "secret": low + k} for k in range(self.width) for low in starts
        ]

    def is_held_out(self, case: Case) -> bool:
        return bool(
            case["low"] == 2
        )  # all numbers between these two: a policy that leaves out some wins the others all the same

    def start(self, case: Case) -> State:
        return case["low"], case["high"], self.guesses

    def observe(self, case: Case, state: State) -> str:
        low, high, _ = state
        return f"low {low} high {high}"

    def act(self, case: Case, state: State, word: str | None) -> Step:
        low, high, left = state
        number, status, result = int(word or 0), ToolStatus.OK, ""
        if number == case["secret"]:
            return Step(state=None, outcome=1.0, tool="guess", result="right")
        if word is None:
            status, result = ToolStatus.INVALID_ARGUMENTS, "no number"
        elif not low <= number <= high:
            status, result = ToolStatus.ERROR, "out of range"
        elif number < case["secret"]:
            low, result = number + 1, "higher"
        else:
            high, result = number - 1, "lower"
        return Step(state=(low, high, left - 1) if left > 1 else None, tool="guess", status=status, result=result)

    def sensible(self, case: Case, state: State) -> Sequence[str]:
        return self.words

    def best(self, case: Case, state: State) -> str:
        low, high, _ = state
        return str((low + high) // 2)


TABLES: Final = {"cities": ("size", "age"), "songs": ("year", "size"), "people": ("age", "year")}
NAMES: Final = {
    "cities": ("Rome", "Oslo", "Lima"),
    "songs": ("Hello", "Yellow", "Help"),
    "people": ("Otto", "Emma", "Anna"),
}
COLUMNS: Final = ("size", "age", "year")


class Sql:
    """A question of a database, answered by three words: table, column, condition. The query is run as far as it has
    come after each."""

    name = "sql"
    calls: Final = 5
    words: tuple[str, ...] = (*TABLES, *COLUMNS, *(name for names in NAMES.values() for name in names))

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        for number, (table, columns) in enumerate(TABLES.items()):
            self._database.execute(f"CREATE TABLE {table} (name, {', '.join(columns)})")
            for row, name in enumerate(NAMES[table]):  # all values differ: no wrong query has the right answer
                values = [name, *(100 * number + 10 * row + k for k in range(len(columns)))]
                self._database.execute(f"INSERT INTO {table} VALUES (?, ?, ?)", values)

    def cases(self) -> Sequence[Case]:
        return [
            {"name": NAMES[table][k], "column": TABLES[table][j], "table": table}
            for k in range(3)
            for j in range(2)
            for table in TABLES
        ]

    def is_held_out(self, case: Case) -> bool:
        return self.cases().index(case) % 4 == 0  # its name was asked for by another column, its column of another name

    def start(self, case: Case) -> State:
        return "", "", "", self.calls

    def observe(self, case: Case, state: State) -> str:
        table, column, error, _ = state
        query = f"column {column} table {table}" if column else f"table {table}" if table else "no query"
        return f"{case['column']} of {case['name']}? {query}{f' error {error}' if error else ''}"

    def act(self, case: Case, state: State, word: str | None) -> Step:
        table, column, error, left = state
        if word is None:
            return self._go_on(table, column, error, left, ToolStatus.INVALID_ARGUMENTS, "no word")
        query = f"SELECT {column or (word if table else '*')} FROM {table or word}"
        query += f" WHERE name = '{word}'" if column else " LIMIT 0"
        rows, failure = self._run(query)
        if failure:  # a query without such a column is begun anew; the agent sees why
            return self._go_on("", "", "column" if table else "table", left, ToolStatus.ERROR, failure)
        if not table:
            return self._go_on(word, "", "", left, ToolStatus.OK, "")
        if not column:
            return self._go_on(table, word, "", left, ToolStatus.OK, "")
        gold, _ = self._run(f"SELECT {case['column']} FROM {case['table']} WHERE name = '{case['name']}'")
        return Step(state=None, outcome=float(rows == gold), tool="sql", result=str(rows))

    def sensible(self, case: Case, state: State) -> Sequence[str]:
        table, column, _, _ = state
        return self.words[6:] if column else COLUMNS if table else tuple(TABLES)

    def best(self, case: Case, state: State) -> str:
        table, column, _, _ = state
        return str(case["name"] if column else case["column"] if table else case["table"])

    @staticmethod
    def _go_on(table: str, column: str, error: str, left: int, status: ToolStatus, result: str) -> Step:
        state = (table, column, error, left - 1) if left > 1 else None
        return Step(state=state, tool="sql", status=status, result=result)

    @cache  # noqa: B019  the games live as long as the process
    def _run(self, query: str) -> tuple[tuple[Any, ...], str]:
        """Rows, or what SQLite says."""
        try:
            return tuple(self._database.execute(query).fetchall()), ""
        except sqlite3.Error as error:
            return (), str(error)


class Door:
    """A corridor of four places, a key at one and a door at another. Between any two acts somebody asks what one would
    like to drink."""

    name = "door"
    places: Final = 4
    acts: Final = 8
    words: tuple[str, ...] = ("left", "right", "take", "open", "tea", "milk")

    def cases(self) -> Sequence[Case]:
        places = range(self.places)
        return [
            {"start": (key + far) % self.places, "key": key, "door": door}
            for far in places
            for key in places
            for door in places
            if door != key
        ]

    def is_held_out(self, case: Case) -> bool:
        return self.cases().index(case) % 4 == 0

    def start(self, case: Case) -> State:
        return case["start"], False, False, self.acts

    def observe(self, case: Case, state: State) -> str:
        at, has_key, is_asked, _ = state
        far = (case["door"] if has_key else case["key"]) - at
        way = f"{abs(far)} {'left' if far < 0 else 'right'}" if far else "here"
        return f"{'door' if has_key else 'key'} {way}{' tea or milk?' if is_asked else ''}"

    def act(self, case: Case, state: State, word: str | None) -> Step:
        at, has_key, is_asked, left = state
        if is_asked:
            return Step(state=(at, has_key, False, left), result="thanks")
        status, result = ToolStatus.OK, ""
        if word == "open" and has_key and at == case["door"]:
            return Step(state=None, outcome=1.0, tool="open", result="the door is open")
        if word == "take" and not has_key and at == case["key"]:
            has_key = True
        elif word == "left" and at > 0:
            at -= 1
        elif word == "right" and at < self.places - 1:
            at += 1
        else:
            known = word in ("left", "right", "take", "open")
            status, result = (
                (ToolStatus.ERROR, "nothing happens") if known else (ToolStatus.INVALID_ARGUMENTS, "no such act")
            )
        tool = word if word in self.words[:4] else "act"
        return Step(state=(at, has_key, True, left - 1) if left > 1 else None, tool=tool, status=status, result=result)

    def sensible(self, case: Case, state: State) -> Sequence[str]:
        return self.words[4:] if state[2] else self.words[:4]

    def best(self, case: Case, state: State) -> str:
        at, has_key, is_asked, _ = state
        goal = case["door"] if has_key else case["key"]
        if is_asked or at == goal:
            return "tea" if is_asked else "open" if has_key else "take"
        return "left" if at > goal else "right"


GAMES: Final[Mapping[str, Game]] = {game.name: game for game in (Guess(), Sql(), Door())}
"""By name."""


def walk(game: Game, case: Case, words: Sequence[str | None]) -> Iterator[tuple[State, str | None, Step]]:
    """The states that `words` lead through, each with its word and what came of it. Words after the end are left
    unread."""
    state: State | None = game.start(case)
    for word in words:
        if state is None:
            return
        step = game.act(case, state, word)
        yield state, word, step
        state = step.state


def observations(game: Game, cases: Sequence[Case]) -> dict[str, tuple[Case, State]]:
    """All that the model can be told in `cases`, each once, with where."""
    found: dict[str, tuple[Case, State]] = {}
    for case in cases:
        seen, to_see = {game.start(case)}, [game.start(case)]
        while to_see:
            state = to_see.pop()
            found.setdefault(game.observe(case, state), (case, state))
            steps = [game.act(case, state, word) for word in (*game.words, None)]
            after = {step.state for step in steps if step.state is not None} - seen
            seen |= after
            to_see += after
    return found
