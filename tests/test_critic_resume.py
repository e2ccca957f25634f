"""A run with a critic goes on bit for bit after `kill -9` and `--resume`: policy, critic, optimisers, values and
advantages."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from crashes import (
    begin,
    check_identical,
    finish,
    kill_all,
    last_step,
    newest_checkpoint,
    read_metrics,
    resume,
    wait_for_answers,
)
from processes import TrainRun
from safetensors import safe_open
from sizes import sized
from warm import WarmCommand

pytestmark = pytest.mark.slow
STEPS = sized(4, 15)
SETTINGS = (
    *("credit.use=turn_gae", "learner.critic.learning_rate=0.01", "learner.epochs=2", "learner.minibatches=2"),
    *("validation.every=0", "loop.checkpoint_every=2", "runtime.workers=1", f"loop.tasks_per_step={sized(2, 3)}"),
    "learner.prefix_cache_tokens=0",
)
"""With one worker calls come one after the other, and without a cache none of them finds a prompt that another, as it
happened, had just left there: numbers are rounded alike only where they are computed beside the same others."""
CRITICS = {
    "values of turns, of the policy's trunk": (),
    "bi-level, values of a model of its own": ("credit.options.level=both", "learner.critic.model={policy}"),
    "values of turns, joint": ("learner.critic.joint=true",),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("critic", sized(list(CRITICS)[:2], list(CRITICS)))
def test_a_run_with_a_critic_goes_on_bit_for_bit_after_kill_9(
    warm: WarmCommand, tmp_path: Path, tiny_policy: Path, critic: str
) -> None:
    """At full size three times, at random moments; else once, after a step that no checkpoint has yet."""
    chance = random.Random(0)
    settings = [setting.format(policy=tiny_policy) for setting in (*SETTINGS, *CRITICS[critic])]
    said = [argument for setting in settings for argument in ("--set", setting)]
    killed, calm = (TrainRun(warm, tmp_path / name, tmp_path / f"{name}-journal") for name in ("killed", "calm"))
    try:
        begin(killed, tiny_policy, *said, steps=STEPS)
        for after in sized([3], [3, 6, 9]):
            killed.wait_for(lambda after=after: last_step(killed) >= after)  # type: ignore[misc]
            if sized(False, True):
                wait_for_answers(killed, chance.randint(0, 6))
                time.sleep(chance.uniform(0.0, 0.3))  # perhaps while values are asked for, or in a weight update
            kill_all(killed, chance)
            resume(killed)
        finish(killed)
        begin(calm, tiny_policy, *said, steps=STEPS)
        finish(calm)
    finally:
        killed.close()
        calm.close()
    check_identical(killed, calm)
    lines = [line for line in read_metrics(calm.folder) if "rows" in line]
    assert len({line["learn/value_loss"] for line in lines}) == STEPS, "else the critic learned nothing"
    with safe_open(next(newest_checkpoint(calm.folder).rglob("trained.safetensors")), "pt") as weights:
        assert any(name.startswith("critic.") for name in weights.keys())  # noqa: SIM118 — no mapping
