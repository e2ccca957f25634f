"""Starts a package of one's own: copies the tested templates that `lightningrl new` and `lightningrl init` hand out."""

from __future__ import annotations

import json
import keyword
import os
import re
from itertools import islice
from pathlib import Path
from typing import Final

from lightningrl.errors import ConfigError

__all__ = ["STACKS", "new_agent", "new_agent_of_traces", "new_package"]

TEMPLATES: Final = Path(__file__).parent / "templates"
STACKS: Final = {"openai": None, "langgraph": "langchain", "openai-agents": "openai-agents", "autogen": "autogen"}
"""Frameworks that an agent can be made from, each with the adapter that tells its roles and tools."""


def new_package(kind: str, name: str, folder: Path | str | None = None) -> Path:
    """Write a plugin package called `lightningrl-NAME` and return its folder (default: `./lightningrl-NAME`).

    `kind`: a folder of `templates`. It installs, runs, and passes its conformance suite as it is.
    Raises ConfigError: bad name, folder in use.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        article = "an" if kind == "adapter" else "a"
        raise ConfigError(
            f"{name!r} cannot be {article} {kind}'s name; use lower-case letters, digits and dashes, like 'my-own'"
        )
    distribution = module.replace("_", "-")
    words = {
        "NAME_MODULE": module,
        "NAME_UPPER": module.upper(),
        "NAME_DIST": distribution,
        "NAME_CLASS": "".join(part.title() for part in module.split("_")),
    }
    target = Path(folder) if folder is not None else Path(f"lightningrl-{distribution}")
    return _copy(TEMPLATES / kind, target, words)


def new_agent(folder: Path | str, stack: str = "openai") -> Path:
    """Write an agent with its tasks, reward, recipe, and the script that makes its starting policy. `stack`: what the
    agent is written with. Raises ConfigError: folder in use, no such stack."""
    if stack not in STACKS:
        raise ConfigError(f"no agent is made from {stack!r}; choose one of: {', '.join(STACKS)}")
    target = _copy(TEMPLATES / "agent", Path(folder), {})
    if (adapter := STACKS[stack]) is not None:
        agent, recipe = TEMPLATES / "agents" / f"{stack}.py.template", target / "recipe.toml"
        (target / "agent.py").write_text(agent.read_text(encoding="utf-8"), encoding="utf-8")
        asked = 'agent = "agent.py:answer"\n'
        named = recipe.read_text(encoding="utf-8").replace(asked, f'{asked}adapters = ["{adapter}"]\n')
        recipe.write_text(named, encoding="utf-8")
    return target


def new_agent_of_traces(folder: Path | str, rows: Path) -> Path:
    """Write a stub of the agent that left traces, its tasks and a reward, and a recipe that begins with them. `rows`: a
    folder of `lightningrl curate`. Raises ConfigError: folder in use, no rows."""
    train, held_out = (rows / "train", rows / "validation") if (rows / "train").is_dir() else (rows, None)
    try:
        with (train / "sft.jsonl").open(encoding="utf-8") as lines:
            messages = [message for line in islice(lines, 1) for message in json.loads(line)["messages"]]
        if not messages or not (train / "tasks.jsonl").is_file():
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError):
        problem = f"{str(rows)!r} has no rows and tasks; make them with `lightningrl curate RUN --into FOLDER`"
        raise ConfigError(problem) from None
    system = next((message.get("content") for message in messages if message.get("role") == "system"), None)
    target = Path(folder)
    words = {"SYSTEM_PROMPT": repr(system), "NO_VALIDATION": "" if held_out else "# "}
    for name, place in {"ROWS_TRAIN": train, "ROWS_VALIDATION": held_out or rows, "ROWS_FOLDER": rows}.items():
        words[name] = json.dumps(os.path.relpath(place.resolve(), target.resolve()))[1:-1]
    return _copy(TEMPLATES / "traces", target, words)


def _copy(template: Path, target: Path, words: dict[str, str]) -> Path:
    files = {
        target / fill(str(source.relative_to(template)).removesuffix(".template"), words): fill(
            source.read_text(encoding="utf-8"), words
        )
        for source in sorted(template.rglob("*.template"))
    }
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"folder {str(target)!r} is in use; name another one")
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"folder {str(target)!r} cannot be written: {error.strerror}; name another one") from error
    return target


def fill(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
