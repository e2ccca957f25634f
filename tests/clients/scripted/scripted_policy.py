"""A trainer backend that learns nothing and whose engine says what a client's row of clients.toml has; and a reward
that writes down what was recorded. scripts/try_clients.py puts this folder on the path of `lightningrl try`.

SCRIPT  a file: {prompt's text: [what is said at the first turn, at the second, …]}     EMITTED, SEEN  files: sampled; recorded
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from try_frameworks import written

from lightningrl import Capabilities, LearnReport, Plugin, Sample, Task, Trajectory, hookimpl
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer


class WritingEngine(ScriptedEngine):
    """Keeps each emission in a file as well."""

    async def generate(self, request: Any) -> Any:
        async for chunk in super().generate(request):
            if chunk.finish_reason is not None:
                emission = self.emissions[request.id]
                kept = {
                    "id": request.id,
                    "prompt": emission.request.prompt_ids,
                    "said": emission.token_ids,
                    "logprobs": emission.logprobs,
                }
                with Path(os.environ["EMITTED"]).open("a") as file:
                    file.write(json.dumps(kept) + "\n")
            yield chunk


class ScriptedBackend:
    """Serves the script."""

    serves_while_learning = False

    def __init__(self, *, policy: str, name: str = "policy", seed: int = 0) -> None:
        reply = reply_of(json.loads(Path(os.environ["SCRIPT"]).read_text()))
        self.engine = WritingEngine(
            tiny_tokenizer(), policy=name, context_length=1_000_000, reply=reply, chunk_tokens=32
        )

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        raise NotImplementedError("the scripted policy learns nothing; use `lightningrl try`")

    def save(self, folder: Path) -> None:
        raise NotImplementedError("the scripted policy has no weights")

    load = export = save

    def close(self) -> None:
        pass


class ScriptedPolicy:
    @hookimpl
    def lightningrl_trainers(self) -> Iterable[Plugin]:
        can = Capabilities(losses=frozenset({"none"}), devices=frozenset({"cpu"}), lora=False, reference_kl=False)
        yield Plugin(name="scripted", summary="says what is written", factory=ScriptedBackend, capabilities=can)


plugin = ScriptedPolicy()


def tasks() -> list[dict[str, str]]:
    return [{"id": "write", "input": os.environ["TASK"]}]


def score(task: Task, output: Any, trajectory: Trajectory) -> float:
    """1.0 for the right text in the file; on the way writes down what was recorded."""
    Path(os.environ["SEEN"]).write_text(json.dumps(describe(trajectory)))
    return float(str(output).strip() == "42")


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """What was recorded of a rollout, as JSON."""
    calls = [
        {
            "id": call.id,
            "agent": call.agent,
            "prompt": call.prompt_ids.tolist(),
            "said": call.completion_ids.tolist(),
            "logprobs": call.logprobs.tolist(),
            "is_break": call.is_break,
            "is_root": call.parent_id is None,
        }
        for call in trajectory.transitions
    ]
    tools = [
        {"name": call.name, "status": call.status, "is_joined": call.transition_id is not None}
        for call in trajectory.tool_calls
    ]
    others = [{"path": call.path, "message": call.message} for call in trajectory.other_calls]
    return {
        "outcome": trajectory.outcome,
        "error": trajectory.error,
        "output": trajectory.output,
        "calls": calls,
        "tools": tools,
        "others": others,
    }


def reply_of(script: Mapping[str, Sequence[str]]) -> Callable[[str], str]:
    """The policy: by a text of the prompt, the first that is in it, what is said at each turn."""

    def reply(prompt: str) -> str:
        texts = next((texts for key, texts in script.items() if key in prompt), ["nobody wrote what to say here"])
        turn = prompt.count("<|im_start|>assistant\n") - 1
        return written(texts[min(turn, len(texts) - 1)])

    return reply
