"""Train the text-to-SQL agent on Spider with real weights.

    python examples/text_to_sql/train_spider.py --spider PATH --policy Qwen/Qwen2.5-Coder-1.5B-Instruct

PATH is the folder that Spider's archive unpacks to: train_spider.json, dev.json, tables.json, database/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import run_command
from lightningrl_client.recipe_file import parse_setting
from lightningrl_training.commands.train import train_command


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
    given = dict(parse_setting(text) for text in settings or [])
    given |= {"tasks.options.path": str(spider.resolve()), "policy.model": policy}
    train_command(recipe, resume=False, overwrite=False, run=run, runs=Path("runs"), settings=given)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
