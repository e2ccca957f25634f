"""The guessing game for TRL's GRPOTrainer: by `environment_factory`, each rollout has a session of the OpenEnv server.

Runs in TRL's environment, which `python curves.py openenv_tools --trl` makes; the trainer's settings are those of
benchmarks/peers/trl_jobs.py.

    GUESS_URL=http://127.0.0.1:8000 python guess_trl.py OUT TASKS.json --steps 10 --every 5 --seed 0
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Game:
    """One rollout's environment: `reset` says what is asked, and each other method is a tool."""

    def __init__(self) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._session = GenericEnvClient(base_url=os.environ["GUESS_URL"]).sync()
        self._session.connect()

    def reset(self, seed: int, **_: Any) -> str:
        self.reward, self._is_over = 0.0, False
        return str(self._session.reset(seed=seed).metadata["prompt"])

    def guess(self, text: str):  # what it returns is not annotated: TRL would describe that to the model, too
        """
        Guess the number.

        Args:
            text: The number.
        """  # noqa: D212  as TRL reads it
        if self._is_over:
            return "the game is over"
        seen = self._session.step({"type": "call_tool", "tool_name": "guess", "arguments": {"text": text}})
        self.reward, self._is_over = self.reward + (seen.reward or 0.0), seen.done
        return str(seen.observation["result"]["data"])


def build_job(tasks: dict[str, list[dict[str, Any]]]) -> Any:
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template
    from trl_jobs import Job

    def earned(environments: list[Game], **_: Any) -> list[float]:
        return [game.reward for game in environments]

    tokenizer = AutoTokenizer.from_pretrained(HERE / "caller")
    tokenizer.response_template = qwen3_template  # our template's markup is Qwen's, which TRL knows by that text
    return Job(
        model=HERE / "caller",
        train=tasks["train"],
        held_out=tasks["validation"],
        prompt=lambda _: [{"role": "user", "content": ""}],  # TRL adds what `reset` says
        reward=earned,
        most_tokens=64,
        tasks_per_step=8,
        learning_rate=1e-3,
        batch=64,
        options={"processing_class": tokenizer, "environment_factory": Game},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("tasks", type=Path)
    for name, usual in (("steps", 10), ("every", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    sys.path.append(str(HERE.parents[1] / "benchmarks" / "peers"))
    from trl_jobs import train

    train(build_job(json.loads(options.tasks.read_text())), options.out, options.steps, options.seed, options.every)


if __name__ == "__main__":
    main()
