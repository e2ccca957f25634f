"""`tests/support/planted_mistakes.py`: each mistake of a newcomer is answered in time, and what the answer says mends
it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted_mistakes import MISTAKES, Mistake, edit, remedied

from lightningrl.errors import ConfigError
from lightningrl.scaffold import new_agent
from lightningrl_client.recipe_file import load_recipe

SCRIPT = Path(__file__).resolve().parent / "support" / "planted_mistakes.py"
AT_ONCE = ("groupsize", "[learners]", "learning_rate in [sampling]", 'steps = "two"', "no [rewards]")
"""Refused when the recipe is read."""


@pytest.mark.parametrize(
    "mistake", [mistake for mistake in MISTAKES if mistake.name in AT_ONCE], ids=lambda mistake: mistake.name
)
def test_a_recipe_is_read_once_it_says_what_the_sentence_says(mistake: Mistake, tmp_path: Path) -> None:
    folder = new_agent(tmp_path / "mine")
    edit(folder, mistake.edits)
    with pytest.raises(ConfigError, match=mistake.says) as refused:
        load_recipe(folder)
    sentence = re.search(mistake.says, str(refused.value))
    assert sentence is not None
    remedied(mistake, folder, sentence)
    assert load_recipe(folder).learner["learning_rate"] == 1e-3


def test_each_mistake_is_another_and_each_has_a_remedy_that_was_thought_of() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 29
    unmended = [mistake.name for mistake in MISTAKES if not (mistake.remedy or mistake.remedy_arguments)]
    assert unmended == ["no such recipe"], "there the argument is left out"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_answered_in_time_and_its_remedy_trains(mistake: Mistake, first_agent: Path) -> None:
    """Within 5 CPU seconds, 10 where torch is imported."""
    command = [sys.executable, str(SCRIPT), "--remedies", "--project", str(first_agent), "--", mistake.name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
