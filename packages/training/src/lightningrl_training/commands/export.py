"""`lightningrl export`: a run's best or newest weights as a transformers folder, a GGUF file or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.console import NewestRunOption, RunsOption
from lightningrl.errors import ConfigError
from lightningrl_training.commands.printing import Page

__all__ = ["export"]

Step = typer.Option(
    help="Whose weights; by default the best by validation, where there was any.", metavar="best|newest|STEP"
)
Dtype = typer.Option(help="By default that of the run's starting folder.", metavar="float32|bfloat16|float16")
Gguf = typer.Option(
    help="Write a file for llama.cpp and Ollama instead, in this precision.", metavar="f16|q8_0|bf16|f32"
)
PushToHub = typer.Option(help="Send it to the Hugging Face hub, too, to a private repository.", metavar="OWNER/NAME")
Check = typer.Option(
    min=0,
    help="Ask what was written so many validation calls again, by transformers, vLLM or llama.cpp; fail at the first "
    "token that differs.",
    metavar="N",
)


def export(
    target: Annotated[Path, typer.Argument(help="Where to write the folder, or with --gguf the file.")],
    run: NewestRunOption = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Which policy, where the run has several.")] = None,
    step: Annotated[str | None, Step] = None,
    dtype: Annotated[str | None, Dtype] = None,
    gguf: Annotated[str | None, Gguf] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write what LoRA learned alone, for peft.")] = False,
    push_to_hub: Annotated[str | None, PushToHub] = None,
    check: Annotated[int, Check] = 0,
) -> None:
    """Write a run's best or newest weights as an ordinary transformers folder (LoRA merged), which asks, samples and
    stops as the run did; as a GGUF file; or as an adapter."""
    from lightningrl_runs.origin import newest_run
    from lightningrl_training.checkpoints import best_checkpoint
    from lightningrl_training.export_check import readers_of
    from lightningrl_training.run import Run

    source = Run(run or newest_run(runs))
    written = source.export(
        target,
        policy=policy,
        step=_parse_step(step),
        dtype=dtype,
        gguf=gguf,
        adapter=adapter,
        push_to_hub=push_to_hub,
        check=check,
    )
    best = best_checkpoint(source.folder)
    which = (
        f", the best by validation ({best.state.score:.3f})" if best is not None and best.state.step == written else ""
    )
    newer = f"; the newest are of step {source.steps}: --step newest" if source.steps > written and step is None else ""
    sent = f", and sent it to {push_to_hub} of the hub" if push_to_hub else ""
    checked = ""
    if check:
        readers = " and ".join(readers_of(target, "its base" if adapter else None))
        checked = f"; the validation calls, asked again of {readers}, are answered as the run did"
    Page().print(f"wrote {target}: weights after step {written}{which}{sent}{checked}{newer}")


def _parse_step(text: str | None) -> str | int | None:
    """`best`, `newest`, or a step."""
    if text is None or text in ("best", "newest"):
        return text
    if not text.isdecimal():
        raise ConfigError(f"--step {text!r} is neither 'best', 'newest' nor a step; write for example --step 40")
    return int(text)
