"""The conformance suite of trainer backends: subclass `BackendConformance` and give it a `make_backend`.

class TestTorch(BackendConformance):
    def make_backend(self, **learner): return TorchBackend(policy=…, **learner)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from lightningrl.backends import Backend, GenerateRequest
from lightningrl.errors import ContextOverflow, LightningError
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import FinishReason, Outcome, Sample, SamplingSettings, Trajectory
from lightningrl_credit import IdenticalAssignment, TurnReturns
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing._pytest import pytest
from lightningrl_testing.groups import make_trajectory, make_transition

__all__ = ["BackendConformance", "Completion", "generate", "make_row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All chunks of one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: frozenset[int]
    finish_reason: FinishReason | None


async def generate(backend: Backend, prompt_ids: Sequence[int], **sampling: object) -> Completion:
    settings = SamplingSettings(**sampling)  # type: ignore[arg-type]
    request = GenerateRequest(id="r", prompt_ids=tuple(prompt_ids), sampling=settings)
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    assert all(chunk.finish_reason is None for chunk in chunks[:-1]), "only the last chunk has a finish reason"
    return Completion(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
        versions=frozenset(chunk.policy_version for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
    )


def make_row(prompt_ids: Sequence[int], completion: Completion, advantage: float, weight: float) -> Sample:
    """Make a row that trains the completion's tokens."""
    length, start = len(prompt_ids) + len(completion.token_ids), len(prompt_ids)
    mask = np.arange(length) >= start

    def filled(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.where(mask, value, 0.0).astype(np.float32)

    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = completion.logprobs
    return Sample(
        rollout_id="r",
        policy="policy",
        token_ids=np.array([*prompt_ids, *completion.token_ids], np.int32),
        mask=mask,
        logprobs=logprobs,
        advantages=filled(advantage),
        weights=filled(weight),
        versions=np.where(mask, min(completion.versions), -1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
    )


class BackendConformance:
    """The specification of a trainer backend."""

    pytestmark = pytest.mark.asyncio  # whatever `asyncio_mode` the plugin's own tests have

    prompt: tuple[int, ...] = (5, 6, 7, 8)
    """Token ids that the policy knows."""
    learning_rate: float = 3e-2
    """Large enough to be seen in a few steps of a tiny policy."""
    losses: tuple[str, ...] = ()
    """Names that `loss` may have; none where there is one loss and no such setting."""

    def make_backend(self, **learner: object) -> Backend:
        """Make a backend on a tiny policy with a context of at most a few thousand tokens, by the plugin's factory,
        which is tested too."""
        raise NotImplementedError

    @asynccontextmanager
    async def backend(self, **learner: object) -> AsyncIterator[Backend]:
        made = await asyncio.to_thread(self.make_backend, **learner)
        try:
            yield made
        finally:
            made.close()

    async def test_a_completion_has_a_logprob_for_each_token_and_one_version(self) -> None:
        async with self.backend() as backend:
            made = await generate(backend, self.prompt, max_tokens=6)
        assert len(made.token_ids) == len(made.logprobs) <= 6
        assert made.token_ids
        assert all(value <= 0.0 for value in made.logprobs)
        assert made.versions == {0}
        assert made.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}

    async def test_a_seed_gives_the_same_completion_alone_and_in_company(self) -> None:
        async with self.backend() as backend:
            alone = await generate(backend, self.prompt, max_tokens=8, seed=7)
            asking = (generate(backend, self.prompt, max_tokens=8, seed=seed) for seed in range(12))
            together = await asyncio.gather(*asking)
        assert together[7].token_ids == alone.token_ids
        assert len({made.token_ids for made in together}) > 1, "seeds differ, so do completions"

    async def test_sampling_stops_after_a_stop_token(self) -> None:
        async with self.backend() as backend:
            first = await generate(backend, self.prompt, max_tokens=4, temperature=0.0)
            stop = first.token_ids[:1]
            stopped = await generate(backend, self.prompt, max_tokens=4, temperature=0.0, stop_token_ids=stop)
        assert stopped.token_ids == first.token_ids[:1]
        assert stopped.finish_reason is FinishReason.STOP

    async def test_a_prompt_without_room_for_a_token_is_an_overflow(self) -> None:
        async with self.backend() as backend:
            with pytest.raises(ContextOverflow):
                await generate(backend, self.prompt * backend.engine.info.context_length, max_tokens=1)

    async def test_closing_a_completion_early_frees_its_place(self) -> None:
        async with self.backend() as backend:
            request = GenerateRequest(id="r", prompt_ids=self.prompt, sampling=SamplingSettings(max_tokens=64))
            generating = cast("AsyncIterator[object]", backend.engine.generate(request))
            async with aclosing(generating) as chunks:  # type: ignore[type-var]
                async for _ in chunks:
                    break
            assert (await generate(backend, self.prompt, max_tokens=2)).token_ids

    async def test_a_positive_advantage_raises_the_sampled_tokens_and_a_negative_one_lowers_them(self) -> None:
        """With every loss."""
        for choice in [{"loss": name} for name in self.losses] or [{}]:
            async with self.backend(learning_rate=self.learning_rate, **choice) as backend:
                before = await self._even_share(backend)
                for _ in range(4):
                    made = await asyncio.gather(*(generate(backend, self.prompt, max_tokens=1) for _ in range(32)))
                    advantages = [1.0 if completion.token_ids[0] % 2 == 0 else -1.0 for completion in made]
                    pairs = zip(made, advantages, strict=True)
                    rows = [make_row(self.prompt, completion, credit, 1 / len(made)) for completion, credit in pairs]
                    await asyncio.to_thread(backend.learn, rows)
                after = await self._even_share(backend)
            assert after > before + 0.2, choice

    async def test_pay_of_calls_counts_at_its_declared_size_beside_the_outcome(self) -> None:
        """Even tokens earn 1 in the end, and odd ones are paid 0.1 twice as they are sampled: the policy follows the
        outcome. Rows are those that `turns` gives, through the whole Scorer."""
        scorer = Scorer(
            credit=TurnReturns(turn_weight=2.0),
            rewards=RewardWeights([WeightedReward(name="reward")]),
            samples=SamplesConfig(),
            trained={"policy": TrainedCalls()},
        )
        async with self.backend(learning_rate=self.learning_rate) as backend:
            before = await self._even_share(backend)
            for _ in range(4):
                made = await asyncio.gather(*(generate(backend, self.prompt, max_tokens=1) for _ in range(32)))
                rollouts = [self._paid_rollout(i, completion) for i, completion in enumerate(made)]
                await asyncio.to_thread(backend.learn, scorer.build(scorer.credit(rollouts)).samples)
            after = await self._even_share(backend)
        assert after > before + 0.2

    def _paid_rollout(self, number: int, completion: Completion) -> Trajectory:
        is_even = completion.token_ids[0] % 2 == 0
        call = make_transition(
            f"r{number}/0",
            prompt=self.prompt,
            completion=completion.token_ids,
            version=min(completion.versions),
            rewards={"pay": 0.0 if is_even else 0.1},
        )
        call = replace(call, logprobs=np.array(completion.logprobs, np.float32))
        return make_trajectory(f"r{number}", [call], reward=float(is_even))

    async def _even_share(self, backend: Backend) -> float:
        """Return the share of even ids among 200 first tokens."""
        made = await asyncio.gather(*(generate(backend, self.prompt, max_tokens=1, seed=seed) for seed in range(200)))
        return sum(completion.token_ids[0] % 2 == 0 for completion in made) / len(made)

    async def test_what_breaks_the_agent_is_unlearned_and_what_the_world_breaks_is_left_out(self) -> None:
        """Odd tokens raise, which earns the lowest reward; every fourth rollout is lost, whatever it sampled."""
        scorer = Scorer(
            credit=IdenticalAssignment(),
            rewards=RewardWeights([WeightedReward(name="reward")]),
            samples=SamplesConfig(),
            trained={"policy": TrainedCalls()},
        )
        async with self.backend(learning_rate=self.learning_rate) as backend:
            before = await self._even_share(backend)
            for _ in range(6):
                made = await asyncio.gather(*(generate(backend, self.prompt, max_tokens=1) for _ in range(32)))
                rollouts = [_broken_rollout(self._paid_rollout(i, completion), i) for i, completion in enumerate(made)]
                rows = scorer.build(scorer.credit(rollouts)).samples
                assert {row.rollout_id for row in rows} == {f"r{number}" for number in range(32) if number % 4}
                await asyncio.to_thread(backend.learn, rows)
            after = await self._even_share(backend)
        assert after > before + 0.2, f"{before:.2f} of the policy's tokens ended well before, {after:.2f} afterwards"

    async def test_learning_rate_zero_changes_nothing_but_the_version(self) -> None:
        async with self.backend(learning_rate=0.0) as backend:
            before = await generate(backend, self.prompt, max_tokens=8, temperature=0.0)
            report = await asyncio.to_thread(backend.learn, [make_row(self.prompt, before, 1.0, 0.1)])
            after = await generate(backend, self.prompt, max_tokens=8, temperature=0.0)
        assert report.policy_version == 1
        assert after.versions == {1}
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs

    async def test_rows_without_an_advantage_leave_the_policy_as_it_is(self) -> None:
        async with self.backend(learning_rate=self.learning_rate) as backend:
            before = await generate(backend, self.prompt, max_tokens=8, temperature=0.0)
            await asyncio.to_thread(backend.learn, [make_row(self.prompt, before, 0.0, 0.1)])
            after = await generate(backend, self.prompt, max_tokens=8, temperature=0.0)
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)

    async def test_recomputed_logprobs_are_those_of_the_engine(self) -> None:
        """Right after sampling the policy is the rollout policy: the estimated KL between them is zero."""
        async with self.backend(learning_rate=0.0) as backend:
            made = await generate(backend, self.prompt, max_tokens=8)
            report = await asyncio.to_thread(backend.learn, [make_row(self.prompt, made, 1.0, 0.1)])
        assert report.tokens == len(made.token_ids)
        assert abs(report.metrics["kl_rollout"]) < 1e-6

    async def test_a_saved_backend_goes_on_where_it_was(self, tmp_path: Path) -> None:
        async with self.backend(learning_rate=self.learning_rate) as backend:
            made = await generate(backend, self.prompt, max_tokens=6, seed=1)
            rows = [make_row(self.prompt, made, 1.0, 0.1)]
            await asyncio.to_thread(backend.learn, rows)
            await asyncio.to_thread(backend.save, tmp_path / "saved")
            await asyncio.to_thread(backend.learn, rows)
            expected = await generate(backend, self.prompt, max_tokens=12, temperature=0.0)
        async with self.backend(learning_rate=self.learning_rate) as backend:
            await asyncio.to_thread(backend.load, tmp_path / "saved")
            assert backend.engine.info.version == 1
            await asyncio.to_thread(backend.learn, rows)
            again = await generate(backend, self.prompt, max_tokens=12, temperature=0.0)
        assert again.versions == expected.versions == {2}
        assert again.token_ids == expected.token_ids
        np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-6)

    async def test_calls_that_arrive_while_learning_are_answered_by_one_version(self) -> None:
        async with self.backend(learning_rate=self.learning_rate) as backend:
            made = await generate(backend, self.prompt, max_tokens=6)
            learning = asyncio.create_task(asyncio.to_thread(backend.learn, [make_row(self.prompt, made, 1.0, 0.1)]))
            calls = [asyncio.create_task(generate(backend, self.prompt, max_tokens=6)) for _ in range(8)]
            await learning
            answers = await asyncio.gather(*calls)
        assert all(len(answer.versions) == 1 for answer in answers)

    async def test_an_export_is_a_transformers_folder(self, tmp_path: Path) -> None:
        async with self.backend() as backend:
            await asyncio.to_thread(backend.export, tmp_path / "weights")
            with pytest.raises(LightningError, match="int3"):
                await asyncio.to_thread(partial(backend.export, tmp_path / "other", dtype="int3"))
            assert not (tmp_path / "other").exists()
        names = {path.name for path in (tmp_path / "weights").iterdir()}
        assert {"config.json", "tokenizer_config.json"} <= names
        assert any(name.endswith(".safetensors") for name in names)


def _broken_rollout(rollout: Trajectory, number: int) -> Trajectory:
    if number % 4 == 0:
        return replace(rollout, outcome=Outcome.INFRASTRUCTURE_ERROR, reward=None)
    return rollout if rollout.reward else replace(rollout, outcome=Outcome.AGENT_ERROR)
