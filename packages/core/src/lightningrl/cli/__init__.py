"""The command line: `lightningrl train | serve | work | rollouts | plugins | export | new`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point. Errors of ours end with one sentence and their exit code; others keep their traceback."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lightningrl.cli.app import app
    from lightningrl.errors import LightningError, Stopped

    try:
        app(standalone_mode=True)
    except LightningError as error:
        from rich.console import Console

        said = "" if isinstance(error, Stopped) else "[bold red]error:[/] "
        Console(stderr=True).print(f"{said}{escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def escape(text: str) -> str:
    """Text as it is, not as rich markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(text)
