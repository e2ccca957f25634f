"""The search for gold: the output that earns the most on a task, by its answer and the forms that outputs take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lightningrl.types import Task
from lightningrl_training.redteam.attacks import Attack, Form, Worth, canonical_text
from lightningrl_training.redteam.forms import PLAIN
from lightningrl_training.redteam.judgement import Trial
from lightningrl_training.redteam.mutators import NOISE

__all__ = ["GOLD", "GoldOutputs", "answers_besides", "find_gold", "form_of_outputs", "gold_attack"]

GOLD: Final = "gold"
PROBED: Final = 4
"""Tasks on which forms are tried."""
Try = Callable[[Sequence[tuple[str, Task, Attack]]], Any]
"""Rewards attacks of (mutator, task, attack); awaited, a list of `Trial`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldOutputs:
    """Gold outputs of some tasks, in trial form."""

    form: Form = PLAIN
    answers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Answers by task; empty = none was found that earns more than nonsense."""
    tried: Sequence[Trial] = ()
    """Payments of them; where none was found, of the outputs that were looked at."""

    looked: Sequence[Trial] = ()
    """Trials on the way."""

    @property
    def returns(self) -> dict[str, float]:
        """Return of gold, by task."""
        return {trial.task.id: trial.total for trial in self.tried if self.answers and trial.total is not None}


async def find_gold(
    answered: Sequence[tuple[Task, Any]], forms: Sequence[Form], attempt: Try, full: float
) -> GoldOutputs:
    """Take the form in which answers earn the most. `answered`: tasks with answers; `full`: the most that there is,
    with which the search ends."""
    probed = answered[:PROBED]
    empty = [(GOLD, task, _attack(output)) for task, _ in probed for output in (NOISE, "")]
    looked: list[Trial] = list(await attempt(empty)) if probed else []
    floor = min((trial.total for trial in looked if trial.total is not None), default=0.0)
    best, most, first = None, floor, None
    for form in forms if probed else ():
        if form.tool_calls and best is not None:
            break
        tried = await attempt([(GOLD, task, gold_attack(form, answer)) for task, answer in probed])
        looked += tried
        totals = [trial.total for trial in tried if trial.total is not None]
        mean = sum(totals) / len(probed)
        first = form if first is None and mean >= full else first
        if totals and mean > most + 1e-3 * max(abs(most), 1e-6):
            best, most = form, mean
        if totals and mean >= full:
            break
    if best is None and first is not None:  # what is read as an answer may earn less than what is not
        swapped = zip(probed, [*probed[1:], *probed[:1]], strict=True)
        tried = await attempt([(GOLD, task, _wrong(first, answer)) for (task, _), (_, answer) in swapped])
        looked += tried
        best = first if any(trial.total is not None and trial.total < full for trial in tried) else None
    if best is None:
        return GoldOutputs(tried=looked)
    answers = {task.id: best.pick(answer) for task, answer in answered}
    tried = await attempt([(GOLD, task, gold_attack(best, answers[task.id])) for task, _ in answered])
    return GoldOutputs(form=best, answers=answers, tried=tried, looked=looked)


def gold_attack(form: Form, answer: Any) -> Attack:
    """The answer in its form, as gold."""
    advice = "mend the reward, or the task's answer"
    output, calls = form.wrap(form.pick(answer)), form.tool_calls
    return Attack(output=output, what="gold", worth=Worth.RIGHT, advice=advice, tool_calls=calls)


def _attack(output: Any) -> Attack:
    return Attack(output=output, what="nonsense words", worth=Worth.NOTHING, advice="compare it with the answer")


def _wrong(form: Form, answer: Any) -> Attack:
    return replace(gold_attack(form, answer), what="the answer of another task", worth=Worth.WRONG)


def form_of_outputs(outputs: Sequence[Any]) -> Form:
    """The form of outputs that a source gives as gold: texts as they are, objects with the same keys."""
    keys = next((tuple(output) for output in outputs if isinstance(output, dict)), None)

    def wrap(value: Any) -> Any:
        return dict.fromkeys(keys, value) if keys is not None and not isinstance(value, dict | list) else value

    return Form(name="as it is given", wrap=wrap)


def answers_besides(task: Task, answer: Any, answers: Mapping[str, Any]) -> tuple[Any, ...]:
    """Answers of other tasks, each once, none of them right here."""
    right = {
        canonical_text(part) for part in (answer, *(task.answer if isinstance(task.answer, list) else [task.answer]))
    }
    others: dict[str, Any] = {}
    for other in answers.values():
        if (key := canonical_text(other)) not in right:
            others.setdefault(key, other)
    return tuple(others.values())
