"""The paper's reward: 0.9 · token F1 of the answer + 0.1 · format.

Format is 1 where the agent's last message is one `<answer>...</answer>` with something in it and nothing around it,
else 0. The answer is what stands in the tags, or the whole message where there are none: who forgets them loses the
format alone.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["answer_reward", "exact_match", "extract_answer", "f1", "has_format", "normalise"]

F1_WEIGHT, FORMAT_WEIGHT = 0.9, 0.1


class Task(Protocol):
    @property
    def answer(self) -> Any: ...


def answer_reward(task: Task, output: Any, trajectory: object = None) -> float:
    """0.0 to 1.0. `task.answer` is one right answer or a list of them; the best match counts."""
    return F1_WEIGHT * f1(task.answer, output) + FORMAT_WEIGHT * has_format(output)


def f1(answers: Any, output: Any) -> float:
    """Harmonic mean of precision and recall over the words of the normalised answer."""
    return max(_f1(normalise(gold), normalise(extract_answer(output))) for gold in _listed(answers))


def exact_match(answers: Any, output: Any) -> bool:
    return normalise(extract_answer(output)) in [normalise(gold) for gold in _listed(answers)]


def has_format(output: Any) -> bool:
    return isinstance(output, str) and re.fullmatch(r"\s*<answer>[^<>]*[^<>\s][^<>]*</answer>\s*", output) is not None


def extract_answer(output: Any) -> str:
    """What stands in the last `<answer>` tags, or the whole message."""
    text = output if isinstance(output, str) else ""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return str(tagged[-1] if tagged else text).strip()


def normalise(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles: SQuAD's normalisation (Rajpurkar et al., 2016)."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(gold: list[str], said: list[str]) -> float:
    common = sum((Counter(gold) & Counter(said)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _listed(answers: Any) -> Iterable[str]:
    return [answers] if isinstance(answers, str) else answers
