"""Of the questions of rag's validations, how many are first searched for by a name that stands in them.

python benchmarks/rag_searches.py runs/table/rag-25/likelihood-0 …
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lightningrl import Run
from lightningrl.records import RolloutFilter, RolloutRecord
from lightningrl.types import RolloutMode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    for folder in parser.parse_args().runs:
        run = Run(folder)
        for step in (0, run.steps):
            rollouts = run.rollouts(RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=1000))
            named = sum(names_what_was_asked(run, rollout) for rollout in rollouts)
            print(f"{folder} after step {step}: {named} of {len(rollouts)}")


def names_what_was_asked(run: Run, rollout: RolloutRecord) -> bool:
    """Whether the rollout's first search has a name (a word with a capital letter) of the question."""
    names = {word for word in rollout.spec.task.input["question"].split() if word[0].isupper()}
    searches = [tool.arguments for call in run.trace(rollout.spec.id).calls for tool in call.tool_calls]
    return bool(searches) and bool(names & set(json.loads(searches[0])["query"].split()))


if __name__ == "__main__":
    main()
