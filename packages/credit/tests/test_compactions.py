"""A compaction that an agent asks for in a history of its own, through a real gateway: trained, as its later prompts
hold what it says; titles and commit messages are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Outcome
from lightningrl_credit import IdenticalAssignment
from lightningrl_credit.rewards.value import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls, read_answers, side_calls
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import CHATML_TEMPLATE

WORK = """You plan a trip. The user wants two seats on the night train to Lisbon on Friday, and a room near the river
for three nights. The tool said that seats 41 and 42 are free, and that the river hotel is full on Saturday."""
COMPACTED = (
    "  The user wants two seats on the night train to Lisbon, and a room near the river; seats 41 and 42 are free, "
    "the hotel is full on Saturday.\n\n"
)
TOOL_CALL = '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'


def merging_tokenizer() -> Any:
    """Build one that merges what is frequent, as a policy's own does: beside other characters a word may have other
    tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    frames = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=frames, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([WORK, COMPACTED] * 4, trainer)
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=core, eos_token=frames[2], pad_token=frames[0])
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
async def test_a_compaction_by_hand_is_trained_and_titles_and_commit_messages_are_not(
    tmp_path: Path, role: str
) -> None:
    engine = ScriptedEngine(merging_tokenizer())
    tools: Any = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:

            async def answer(*messages: Any, says: str, **more: Any) -> str:
                engine.enqueue(says)
                made = await client.chat.completions.create(model="m", messages=messages, **more)
                return made.choices[0].message.content or ""

            task = {"role": "user", "content": WORK}
            title = await answer(
                {"role": "user", "content": f"A title, please: {WORK}"}, says="A night train to Lisbon"
            )
            await answer(task, says=TOOL_CALL, tools=tools)
            asked = {"role": "user", "content": f"Sum up:\n{WORK}"}
            text = (await answer(asked, says=COMPACTED)).strip()
            so_far = {"role": role, "content": f"({title}) What was done so far:\n\n<summary>{text}</summary>\nGo on."}
            go_on = {"role": "user", "content": "Book it."}
            await answer(*([so_far, go_on] if role == "system" else [go_on, so_far, go_on]), says="booked", tools=tools)
            await answer({"role": "user", "content": "A message for the commit of a.py."}, says=f"Book it: {WORK[:60]}")
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    names = {
        call.id: name
        for call, name in zip(trajectory.transitions, ("title", "work", "summary", "next", "commit"), strict=True)
    }
    compaction, later = trajectory.transitions[2:4]
    assert compaction.completion_ids[:-1].tobytes() not in later.prompt_ids.tobytes(), "other tokens at its edges"
    assert {names[call_id] for call_id in side_calls(trajectory.transitions)} == {"title", "commit"}
    assert read_answers(trajectory.transitions) == {compaction.id: later.id}
    group = [replace(trajectory, reward=1.0), replace(trajectory, rollout_id="other", reward=0.0)]
    rewards, trained = RewardWeights([WeightedReward(name="reward")]), {"policy": TrainedCalls()}
    scorer = Scorer(rewards=rewards, credit=IdenticalAssignment(), samples=SamplesConfig(), trained=trained)
    scored = scorer.build(scorer.credit(group))
    untrained = {names[call_id] for call_id, credit in scored.scores[0].advantages.items() if credit is None}
    assert untrained == {"title", "commit"}
    assert any(compaction.completion_ids.tobytes() in row.token_ids.tobytes() for row in scored.samples)
