"""docs/explanation/credit/branches.md, run from top to bottom: a run with branches, `lightningrl branch`, and an agent that does
not repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import WarmCommand

from lightningrl_runs.metrics import read_metrics
from lightningrl_training.run import Run

pytestmark = pytest.mark.slow
BAD = {
    ("g000000-000", "--at", "9"): "rollout 'g000000-000' has 2 calls, so it cannot branch after 9; choose 0 to 2",
    ("nobody",): "no rollout 'nobody'; near it are",
    ("g000000-000", "--samples", "0"): "samples is 0; branch once or more at each state",
}


def test_the_page_runs_and_a_rollout_can_be_branched_again(
    run_page: Callable[..., str], tmp_path: Path, warm: WarmCommand
) -> None:
    said = run_page("docs/explanation/credit/branches.md")
    rows = [line.split() for line in said.splitlines() if re.match(r" +[01] +[\d.]+ +[\d.]+ +3 +0", line)]
    assert [row[0] for row in rows] == ["0", "1"], said
    assert re.search(
        r"diverged: the branch diverged at call 0: its prompt differs from token \d+ on: '.*asked at.*' now, .* then",
        said,
    ), said
    trained = [line for line in read_metrics(tmp_path / "runs" / "two" / "metrics.jsonl") if "rows" in line]
    assert sum(line.get("branches", 0) for line in trained) > 0
    assert all(line.get("branches_diverged", 0) == 0 for line in trained)
    before = Run(tmp_path / "runs" / "two").rollouts()
    again = warm.run(
        "lightningrl", "branch", "runs/two", "g000000-000", "--samples", "4", "--at", "1", "--json", cwd=tmp_path
    )
    (state,) = map(json.loads, again.stdout.splitlines())
    assert (state["calls"], state["diverged"], len(state["returns"])) == (1, 0, 4), "three were there, one is new"
    assert Run(tmp_path / "runs" / "two").rollouts() == before, "the run stays as it is"

    branch, source = next((one.spec.id, one.spec.branch.rollout_id) for one in before if one.spec.branch is not None)
    of_branch = f"rollout '{branch}' is a branch of '{source}', and a branch is not branched again; branch '{source}'"
    for arguments, sentence in {**BAD, (branch,): of_branch}.items():
        ran = warm.run("lightningrl", "branch", "runs/two", *arguments, cwd=tmp_path)
        assert ran.returncode in (1, 2) and sentence in " ".join(ran.stderr.split()), ran.stderr
