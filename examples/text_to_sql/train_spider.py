"""Train the text-to-SQL agent on Spider with real weights.

    python examples/text_to_sql/train_spider.py --spider PATH --policy Qwen/Qwen2.5-Coder-1.5B-Instruct

PATH is the folder that Spider's archive unpacks to: train_spider.json, dev.json, tables.json, database/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import run_command
from lightningrl_training.commands.train import train


def main(
    spider: Annotated[Path, typer.Option(help="Spider's folder.")],
    policy: Annotated[
        str, typer.Option(help="Hub name or folder of the model to train.")
    ] = "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    run: Annotated[Path | None, typer.Option(help="The run folder; by default a new one below runs/.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of spider.toml, e.g. --set loop.steps=20.")
    ] = None,
) -> None:
    recipe = Path(__file__).with_name("spider.toml")
    path = f"tasks.options.path={json.dumps(str(spider.resolve()))}"
    train(recipe, run=run, policy=policy, settings=[*(settings or ()), path])


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
