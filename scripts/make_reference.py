"""Writes docs/reference.md: every key of a recipe, every setting of the torch backend, every hook, from the code that defines them.

python scripts/make_reference.py
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lightningrl import config, plugins
from lightningrl_torch import learner_settings, settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
TABLES = {
    "Recipe": "Top level",
    "TasksConfig": "[tasks]",
    "PolicyConfig": "[policy]",
    "OtherPolicyConfig": "[policies.NAME]",
    "RewardConfig": "[rewards.NAME]",
    "IntermediateConfig": "[intermediate_rewards.NAME]",
    "CreditConfig": "[credit]",
    "LoopConfig": "[loop]",
    "SamplingConfig": "[sampling]",
    "ValidationConfig": "[validation]",
    "SamplesConfig": "[samples]",
    "OutcomesConfig": "[outcomes]",
    "RuntimeConfig": "[runtime]",
    "RoleConfig": "[roles.NAME]",
    "UpstreamConfig": "[upstream]",
    "TelemetryConfig": "[telemetry]",
}
"""Classes of the recipe in the order of the page."""
HIDDEN = {"folder", "model_config"}
"""Fields that nobody writes."""
OFFERED = {"LearnerSettings": {"policy", "name"}, "Settings": {"max_staleness"}}
"""Settings of backends that the run fills in."""


def main() -> int:
    PAGE.write_text(reference(), encoding="utf-8")
    return 0


def reference() -> str:
    """The page."""
    recipe, torch = classes(config), classes(learner_settings) | classes(settings)
    parts = [
        "# Reference\n\nMade by `python scripts/make_reference.py` from the code; a test says when it is not current. "
        "`lightningrl recipe show RECIPE` shows the values of one recipe.\n\n## Recipe\n\n"
        "A TOML file, or a Python file with `recipe = Recipe(...)`; `--set loop.steps=5` overrides one key.\n"
    ]
    parts += [table(title, recipe[name], recipe) for name, title in TABLES.items()]
    parts.append(table("[learner], where the backend is torch", torch["Settings"], torch))
    parts.append(hooks())
    return "\n".join(parts)


def classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def table(title: str, node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> str:
    rows = [f"| `{name}` | {default} | {said} |" for name, default, said in fields(node, known)]
    said = " ".join((ast.get_docstring(node) or "").split())
    return f"### {title}\n\n{said}\n\n| key | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def fields(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str, str]]:
    """Name, default, and the sentence under each field, those of the classes above first."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            yield from fields(known[base.id], known)
    body = node.body
    for number, statement in enumerate(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name in HIDDEN or name in OFFERED.get(node.name, ()):
            continue
        after = body[number + 1] if number + 1 < len(body) else None
        said = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = " ".join(str(after.value.value).split()).replace("|", "\\|")
        yield name, default_of(statement.value), said


def default_of(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given:
            return f"`{ast.unparse(given['default'])}`"
        return "none" if "default_factory" in given else "**required**"
    if value is None:
        return "**required**"
    if isinstance(value, ast.Call):
        return "see below"
    return f"`{ast.unparse(value)}`"


def hooks() -> str:
    """What a plugin may implement with `@hookimpl`, in a module that an entry point of the group `lightningrl` names."""
    lines = ["## Hooks\n", f"{hooks.__doc__}\n", "| hook | |", "|---|---|"]
    for name, hook in vars(plugins.HookSpecs).items():
        if name.startswith(plugins.PREFIX):
            arguments = ", ".join(parameter for parameter in inspect.signature(hook).parameters if parameter != "self")
            lines.append(f"| `{name}({arguments})` | {' '.join((inspect.getdoc(hook) or '').split())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
