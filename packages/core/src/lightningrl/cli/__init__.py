"""The command line: `lightningrl init | train | try | serve | work | rollouts | recipe | plugins | export | new`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["escape", "main", "run_command", "write_json"]


def main() -> None:
    """Entry point."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lightningrl.cli.app import app
    from lightningrl.terminal import accept_any_text

    accept_any_text()
    run_command(app)


def run_command(command: Callable[[], object]) -> None:
    """Run it. Errors of ours end with one sentence and their exit code; others keep their traceback."""
    from lightningrl.errors import ConfigError, LightningError, Stopped
    from lightningrl.hints import missing_hint

    try:
        try:
            command()
        except ModuleNotFoundError as error:
            if (hint := missing_hint(error.name or "")) is None:
                raise
            raise ConfigError(hint) from error
    except LightningError as error:
        from rich.console import Console

        said = "" if isinstance(error, Stopped) else "[bold red]error:[/] "
        for sentence in error.args:
            Console(stderr=True).print(f"{said}{escape(str(sentence))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def escape(text: str) -> str:
    """Text as it is, not as rich markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(text)


def write_json(value: object) -> None:
    """On a line of standard output."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value, enc_hook=lambda of_numpy: of_numpy.tolist()) + b"\n")
