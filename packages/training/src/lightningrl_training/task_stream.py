"""The stream of a run's tasks, by position: which are ordered next, and which the weights are done with."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["TaskStream"]


class TaskStream:
    """Positions in the stream of tasks, whose groups may be done with out of order.

        0  1  2  3  4  5  6          position = 2, done_beyond = (3, 5), the next to be ordered = 6
        ✓  ✓  ·  ✓  ·  ✓             2 and 4 are out

    A resumed run orders 2 and 4 again, and 6; never 3 or 5.
    """

    def __init__(self, position: int, done_beyond: Iterable[int]) -> None:
        self._position = self._next = position
        self._done = set(done_beyond)

    def take_next(self) -> int:
        """The next position to be ordered."""
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return self._next - 1

    def finish(self, position: int) -> None:
        """Note that the step under way is done with a position."""
        self._done.add(position)

    def reopen(self, positions: Iterable[int]) -> None:
        """Take positions back, whose groups are run again."""
        self._done.difference_update(positions)

    def advance(self) -> tuple[int, tuple[int, ...]]:
        """The first position that is not done with, and those after it that are."""
        while self._position in self._done:
            self._done.remove(self._position)
            self._position += 1
        self._next = max(self._next, self._position)
        return self._position, tuple(sorted(self._done))
