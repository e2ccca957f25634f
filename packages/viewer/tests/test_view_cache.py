"""What the viewer computes of a run that goes on stays within its share, and what is shown late says so."""

from __future__ import annotations

from pathlib import Path

from lightningrl_runs.queries.health import Position
from lightningrl_viewer.page import Cache


class Clock:
    """Time passes only where something is computed."""

    def __init__(self) -> None:
        self.now = 100.0
        self.computed: list[str] = []

    def __call__(self) -> float:
        return self.now

    async def compute(self, what: str, seconds: float = 0.05) -> str:
        self.now += seconds
        self.computed.append(what)
        return f"{what} of {self.now:.2f}"


async def test_what_is_as_the_run_is_stands_and_all_that_is_computed_again_takes_a_half_percent_of_the_time(
    tmp_path: Path,
) -> None:
    clock, metrics = Clock(), tmp_path / "metrics.jsonl"
    cache = Cache(tmp_path, clock)

    async def look(what: str) -> str:
        return await cache.get(what, lambda: clock.compute(what))

    first = await look("a")
    clock.now += 1000
    assert await look("a") == first and clock.computed == ["a"] and cache.fresh_in("a") is None
    for number in range(2000):
        metrics.write_text("x" * number)
        await look("ab"[number % 2])
        clock.now += 0.05
    spent = 0.05 * (len(clock.computed) - 1)
    assert 0.3 < spent <= 0.005 * 2000 * 0.05 + 0.1, "both are new once, and then share what there is"
    assert 0 < (cache.fresh_in("a") or 0.0) <= 10.0


async def test_a_page_made_with_an_older_part_is_older_itself_and_is_made_again(tmp_path: Path) -> None:
    clock, metrics = Clock(), tmp_path / "metrics.jsonl"
    cache = Cache(tmp_path, clock)

    async def page(name: str) -> str:
        async def make() -> str:
            return await cache.get("part", lambda: clock.compute("part")) + await clock.compute(name)

        return await cache.get(name, make)

    await page("first")
    metrics.write_text("news")
    await page("second")
    assert clock.computed == ["part", "first", "second"], "the part is not paid for yet"
    late = cache.fresh_in("second")
    assert late is not None
    clock.now += late
    await page("second")
    assert clock.computed[3:] == ["part", "second"] and cache.fresh_in("second") is None


async def test_a_finished_step_is_shown_at_once_and_nothing_stands_for_minutes(tmp_path: Path) -> None:
    clock = Clock()
    cache = Cache(tmp_path, clock)

    async def look(step: int, call: int, seconds: float = 0.05) -> None:
        cache.see(Position(step=step, attempt=1, call=call, running=1, later_steps=()))
        await cache.get("a", lambda: clock.compute(f"{step}.{call}", seconds))

    await look(1, 1)
    await look(1, 2)
    await look(2, 3, seconds=60.0)
    await look(2, 4)
    assert clock.computed == ["1.1", "2.3"]
    clock.now += 15.0
    await look(2, 5)
    assert clock.computed == ["1.1", "2.3", "2.5"]
