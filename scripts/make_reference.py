"""Writes docs/reference/recipe.md: every key of a recipe, every setting of the backends, every hook, from the code that
defines them.

python scripts/make_reference.py
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lightningrl import plugins

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "recipe.md"
CORE = ROOT / "packages" / "core" / "src" / "lightningrl"
TORCH = ROOT / "packages" / "trainer-torch" / "src" / "lightningrl_torch"
VERL = ROOT / "packages" / "trainer-verl" / "src" / "lightningrl_verl"
RECIPE: Final = {
    "Recipe": "Top level",
    "TasksConfig": "[tasks]",
    "SplitConfig": "[tasks.train] and [tasks.validation], of a task source",
    "SourceConfig": "[tasks.sources.NAME]",
    "PolicyConfig": "[policy]",
    "OtherPolicyConfig": "[policies.NAME]",
    "CallRule": "[[policy.calls]] and [[policies.NAME.calls]]",
    "RewardConfig": "[rewards.NAME]",
    "IntermediateConfig": "[intermediate_rewards.NAME]",
    "CreditConfig": "[credit]",
    "JudgeConfig": "[judge]",
    "LoopConfig": "[loop]",
    "SamplingConfig": "[sampling]",
    "ValidationConfig": "[validation]",
    "ValidationSamplingConfig": "[validation.sampling]",
    "SamplesConfig": "[samples]",
    "OutcomesConfig": "[outcomes]",
    "RuntimeConfig": "[runtime]",
    "RoleConfig": "[roles.NAME]",
    "UpstreamConfig": "[upstream]",
    "NamedUpstreamConfig": "[upstream.models.NAME]",
    "TelemetryConfig": "[telemetry]",
}
"""Classes of the recipe in the order of the page; so are those of the backends."""
OF_TORCH: Final = {
    "Settings": "[learner], where the backend is torch",
    "CriticSettings": "[learner.critic]",
    "LoraSettings": "[learner.lora]",
    "SequenceMask": "[learner.sequence_mask]",
    "VllmSettings": "[learner.vllm]",
}
OF_VERL: Final = {
    "Settings": "[learner] and [backends.verl], where the backend is verl",
    "CriticSettings": "[backends.verl.critic]",
    "VerlLoraSettings": "[learner.lora], where the backend is verl",
}
REQUIRED: Final = "required"
HIDDEN = {"folder", "model_config"}
"""Fields that nobody writes."""
OFFERED = {"LearnerSettings": {"policy", "name"}, "Settings": {"max_staleness"}}
"""Settings of backends that the run fills in."""


def main() -> int:
    PAGE.write_text(reference(), encoding="utf-8")
    return 0


def reference() -> str:
    """The page."""
    recipe = classes(CORE / "recipe_tables.py") | classes(CORE / "recipe.py")
    learner = classes(TORCH / "learner_settings.py")
    torch, verl = learner | classes(TORCH / "settings.py"), learner | classes(VERL / "settings.py")
    above = dict(fields(torch["Settings"], torch))
    launchers = functions(VERL / "plugin.py")
    parts = [
        "# Reference\n\nMade from the code by `scripts/make_reference.py`. "
        "`lightningrl recipe show RECIPE` shows the values of one recipe.\n\n## Recipe\n\n"
        "A TOML file, or a Python file with `recipe = Recipe(...)`; `--set loop.steps=5` overrides one key. "
        """A part of a key that holds a dot stands in quotes: `--set 'policies."qwen2.5".model=…'`. """
        "Each key is shown with its default; *None* is what a key without a default is when left out.\n",
        *(section(title, recipe[name], recipe) for name, title in RECIPE.items()),
        *(section(title, torch[name], torch) for name, title in OF_TORCH.items()),
        *(section(title, verl[name], verl, above) for name, title in OF_VERL.items()),
        section("[runtime.launchers.ray]", launchers["create_ray_launcher"], {}),
        hooks(),
    ]
    return "\n".join(parts)


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {
        node.name: node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    }


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def section(
    title: str,
    node: ast.ClassDef | ast.FunctionDef,
    known: dict[str, ast.ClassDef],
    above: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> str:
    """Of a class's fields, its bases' among them, or of a function's parameters; those of another section by name."""
    keys = dict(fields(node, known) if isinstance(node, ast.ClassDef) else parameters(node))
    items = [item(name, *key) for name, key in keys.items() if key != above.get(name)]
    said = " ".join((ast.get_docstring(node) or "").split())
    same = ", ".join(f"`{name}`" for name, key in keys.items() if key == above.get(name))
    alike = f"As for torch: {same}.\n\n" if same else ""
    return f"### {title}\n\n{said}\n\n{alike}" + "\n".join(items) + "\n"


def item(name: str, default: str, said: str) -> str:
    """A key as one would write it, and what it is for."""
    if default.startswith("`"):
        return f"- `{name} = {default.strip('`')}`: {said}".removesuffix(": ")
    mark = " (required)" if default == REQUIRED else ""
    return f"- `{name}`{mark}: {said}".removesuffix(": ")


def fields(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Iterator[tuple[str, tuple[str, str]]]:
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
            said = " ".join(str(after.value.value).split())
        yield (
            name,
            (
                default_of(statement.value),
                " ".join(part for part in (said, choices(statement.annotation, said), see(name)) if part),
            ),
        )


def see(name: str) -> str:
    """Where a key of the top level is a table: which."""
    return next((f"`{title}`." for title in RECIPE.values() if title.strip("[]").split(".")[0] == name), "")


def parameters(node: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, str]]]:
    for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        assert parameter.annotation is not None
        yield parameter.arg, (default_of(default), choices(parameter.annotation, ""))


def choices(annotation: ast.expr, said: str) -> str:
    """Where only some words are allowed, and the sentence says not which: which."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            words = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if all(isinstance(word, ast.Constant) and f"`{word.value!s}`" in said for word in words):
                return ""
            listed = ", ".join(toml(word) for word in words)
            return f"One of {listed}." if len(words) > 1 else f"Always {listed}."
    return ""


def default_of(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given:
            return toml(given["default"])
        return "none" if "default_factory" in given else REQUIRED
    if value is None:
        return REQUIRED
    if isinstance(value, ast.Call):
        return "a table of its own"
    return toml(value)


def toml(value: ast.expr) -> str:
    """As one would write it in a recipe."""
    if isinstance(value, ast.Constant) and value.value is None:
        return "–"
    if isinstance(value, ast.Constant) and isinstance(value.value, bool | str):
        return f"`{json.dumps(value.value)}`"
    if isinstance(value, ast.Tuple):
        return f"`[{', '.join(toml(one).strip('`') for one in value.elts)}]`"
    return f"`{ast.unparse(value)}`"


def hooks() -> str:
    """What a plugin may implement with `@hookimpl`, in a module that an entry point of the group `lightningrl`
    names."""
    lines = ["## Hooks\n", " ".join((hooks.__doc__ or "").split()) + "\n"]
    for name, hook in vars(plugins.HookSpecs).items():
        if name.startswith(plugins.PREFIX):
            arguments = ", ".join(parameter for parameter in inspect.signature(hook).parameters if parameter != "self")
            lines.append(f"- `{name}({arguments})`: {' '.join((inspect.getdoc(hook) or '').split())}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
