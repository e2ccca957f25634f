"""Collects every message that the program can print to a person: the sentences of errors, of warnings in the log and of
the doctor's findings, as templates (`no file ⟨path⟩; name another one`).

python scripts/messages.py        prints `package/module.py: message` for each

A message is the text that reaches a sink: an error of ours, a `ValueError` (pydantic puts it into the recipe's error),
`logger.warning` and above, `warned` and `failed` of the doctor. Text is followed through names, conditionals, lists,
functions that return it, and functions that hand it on to a sink.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LEFT_OUT: Final = frozenset({"testing"})
"""Packages that speak to those who write tests, not to users."""
FORECAST: Final = "training/doctor/bill.py"
"""Says what a run will cost, which is no message."""
BASES: Final = frozenset({"LightningError", "ValueError", "TypeError", "RuntimeError", "ModuleNotFoundError"})
"""Errors whose sentences are messages; subclasses that are ours are found."""
LEVELS: Final = frozenset({"warning", "error", "exception", "critical"})
FINDINGS: Final = frozenset({"warned", "failed", "judge"})
"""`judge` is one of the two in the doctor's checks."""
EXPLAINERS: Final = re.compile(r"_?(?:explain|missing|problem|why)\w*")
"""Functions that return messages, whoever tells them."""
CARRIERS: Final = frozenset({"defect", "divergence", "error", "failure", "lost", "problem", "refused"})
"""Fields that hold a message until it is told."""
FEWEST_WORDS: Final = 3
"""A template with fewer words of its own hands on what another site says."""
DEEPEST: Final = 6
MOST_FORMS: Final = 12
"""Forms of one site (`x if a else y` has two) that are told apart."""
HOLE: Final = re.compile(r"⟨[^⟩]*⟩")
_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[-#0 +]*\d*(?:\.\d+)?[sdrfgeiax]")
_PASSING: Final = frozenset(
    {"clean_text", "dict", "fromkeys", "join", "list", "next", "one_line", "set", "sorted", "str", "tuple"}
)
"""Functions that give back the text of their first argument."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Message:
    """A sentence of the program, with what it fills in as `⟨name⟩`."""

    module: str
    """`package/module.py`."""
    text: str


@dataclass(kw_only=True, slots=True)
class Module:
    """A parsed file and what is looked up in it."""

    name: str
    tree: ast.Module
    functions: dict[str, list[Function]]
    parents: dict[ast.AST, ast.AST]

    @classmethod
    def parse(cls, file: Path, name: str) -> Module:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions: dict[str, list[Function]] = defaultdict(list)
        parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTIONS):
                functions[node.name].append(node)
            parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
        return cls(name=name, tree=tree, functions=functions, parents=parents)

    @property
    def package(self) -> str:
        return self.name.split("/")[0]

    def around(self, node: ast.AST) -> Function | None:
        """The function that a node stands in."""
        current = self.parents.get(node)
        while current is not None and not isinstance(current, _FUNCTIONS):
            current = self.parents.get(current)
        return current if isinstance(current, _FUNCTIONS) else None


class Collector:
    """Follows text from sinks back to where it is written."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        self.errors = _error_names(modules)
        self.handing_on: dict[tuple[str, str], int] = {}
        """(function, its package) to the position of the argument that it hands on to a sink."""
        self._functions: dict[str, list[tuple[Module, Function]]] = defaultdict(list)
        for module in modules:
            for name, functions in module.functions.items():
                self._functions[name] += [(module, function) for function in functions]

    def messages(self) -> list[Message]:
        """Every message, sorted, each once."""
        size = -1
        messages: set[Message] = set()
        while size != len(self.handing_on):  # a function that hands text on to a sink is a sink
            size = len(self.handing_on)
            messages = {message for module in self.modules for message in self._of(module)}
        return sorted(messages)

    def _of(self, module: Module) -> Iterator[Message]:
        for node in _nodes(module.tree):
            for texts in self._sunk(module, node) if isinstance(node, ast.Call) else self._carried(module, node):
                for text in texts:
                    shown = tidy(text)
                    if len(HOLE.sub(" ", shown).split()) >= FEWEST_WORDS:
                        yield Message(module=module.name, text=shown)

    def _carried(self, module: Module, node: ast.AST) -> Iterator[list[str]]:
        """The texts that wait in a field for the one who tells them: `error=f"…"`, `self.lost = f"…"`."""
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if isinstance(node, ast.keyword | ast.Assign) and (
            getattr(node, "arg", "") in CARRIERS or any(_carries(target) for target in targets)
        ):
            yield self.texts(module, node.value)
        elif isinstance(node, _FUNCTIONS) and EXPLAINERS.fullmatch(node.name):
            yield self._returned(module, node.name, 0)

    def _sunk(self, module: Module, call: ast.Call) -> Iterator[list[str]]:
        """The texts of each message that a call tells, none where it is no sink."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = (
            call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
        )
        at = self.handing_on.get((name, module.package))
        if owner == "logger" and name in LEVELS:
            yield self._logged(module, call)
        elif name in self.errors or name in BASES:
            for argument in call.args:
                yield self.texts(module, argument, feeds=True)
        elif owner in self.errors:  # Refusal.at(where, sentence)
            texts = [text for argument in call.args[1:2] for text in self.texts(module, argument, feeds=True)]
            yield [f"⟨field⟩ {text}" for text in texts]
        elif name in FINDINGS and isinstance(call.func, ast.Name) and "/doctor/" in module.name:
            yield self.texts(module, call.args[0], feeds=True)
        elif at is not None and at < len(call.args):
            yield self.texts(module, call.args[at], feeds=True)

    def _logged(self, module: Module, call: ast.Call) -> list[str]:
        if not call.args:
            return []
        forms = []
        for text in self.texts(module, call.args[0], feeds=True):
            filled = [text]
            hands_on = len(_PERCENT.sub(" ", text).split()) < FEWEST_WORDS
            for argument in call.args[1:]:
                if not _PERCENT.search(filled[0]):
                    break
                values = ["⟨…⟩"] if isinstance(argument, ast.Starred) else self.texts(module, argument, feeds=hands_on)
                filled = [_fill(form, value) for form in filled for value in values]
            forms += [_PERCENT.sub("⟨…⟩", form) for form in filled]
        return forms[: MOST_FORMS * 2]

    def texts(self, module: Module, node: ast.expr, depth: int = 0, *, feeds: bool = False) -> list[str]:
        """The forms that an expression's text can have; `⟨name⟩` for what only a run can say."""
        if depth > DEEPEST:
            return [_hole(node)]
        forms = list(dict.fromkeys(self._texts(module, node, depth, feeds=feeds)))[:MOST_FORMS]
        return forms or [_hole(node)]

    def _texts(self, module: Module, node: ast.expr, depth: int, *, feeds: bool) -> list[str]:
        below = depth + 1
        if alternatives := _alternatives(node):
            return self._all(module, alternatives, below, feeds=feeds)
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return self._joined(module, values, below)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [a + b for a in self.texts(module, left, below) for b in self.texts(module, right, below)]
            case ast.BinOp(left=left, op=ast.Mod()):
                return [_PERCENT.sub("⟨…⟩", text) for text in self.texts(module, left, below)]
            case ast.Name():
                return self._named(module, node, below, feeds=feeds)
            case ast.Attribute(attr=name) if self._is_property(name):
                return self._returned(module, name, below)
            case ast.Call():
                return self._called(module, node, below, feeds=feeds)
        return []

    def _is_property(self, name: str) -> bool:
        marks = (mark for _, function in self._functions.get(name, ()) for mark in function.decorator_list)
        return any(getattr(mark, "id", "") in {"property", "cached_property"} for mark in marks)

    def _all(self, module: Module, nodes: Sequence[ast.expr], depth: int, *, feeds: bool) -> list[str]:
        return [text for node in nodes for text in self.texts(module, node, depth, feeds=feeds)]

    def _joined(self, module: Module, values: Sequence[ast.expr], depth: int) -> list[str]:
        forms = [""]
        for value in values:
            if isinstance(value, ast.Constant):
                parts = [str(value.value)]
            elif isinstance(value, ast.FormattedValue) and value.conversion == -1 and value.format_spec is None:
                inner = self.texts(module, value.value, depth)
                parts = [text if _is_text(text) else _hole(value.value) for text in inner]
            else:
                parts = [_hole(value.value if isinstance(value, ast.FormattedValue) else value)]
            forms = [form + part for form in forms for part in dict.fromkeys(parts)][:MOST_FORMS]
        return forms

    def _named(self, module: Module, node: ast.Name, depth: int, *, feeds: bool) -> list[str]:
        function = module.around(node)
        forms: list[str] = []
        while function is not None:
            arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            values = list(_values(function, node.id))
            if node.id in arguments and not values:
                if feeds:
                    is_method = arguments[0] in {"self", "cls"}
                    name = _caller(module, function)
                    shift = is_method or name != function.name
                    self.handing_on[name, module.package] = arguments.index(node.id) - shift
                return [_hole(node)]
            for value in values:
                forms += self.texts(module, value, depth, feeds=feeds)
            if values:
                return forms
            function = module.around(function)
        for value in _values(module.tree, node.id, deep=False):
            forms += self.texts(module, value, depth)
        return forms

    def _called(self, module: Module, call: ast.Call, depth: int, *, feeds: bool) -> list[str]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name == "format" and isinstance(call.func, ast.Attribute):
            return [re.sub(r"\{\w*[^}]*\}", "⟨…⟩", text) for text in self.texts(module, call.func.value, depth)]
        if name == "get" and isinstance(call.func, ast.Attribute):
            return self._all(module, [call.func.value, *call.args[1:]], depth, feeds=feeds)
        if name in _PASSING:
            return self._all(module, call.args[:1], depth, feeds=feeds)
        if isinstance(call.func, ast.Attribute) and name in {"values", "strip", "rstrip", "removesuffix"}:
            return self.texts(module, call.func.value, depth, feeds=feeds)
        return self._returned(module, name, depth)

    def _returned(self, module: Module, name: str, depth: int) -> list[str]:
        """The texts that functions of this name return or yield: of the module itself, else those it can import."""
        own = module.functions.get(name)
        functions = [(module, function) for function in own] if own else self._functions.get(name, [])
        if len(functions) > 3:
            return []
        forms = []
        for owner, function in functions:
            for node in _nodes(function):
                value = getattr(node, "value", None)
                is_said = isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and owner.around(node) is function
                if is_said and value:
                    forms += [text for text in self.texts(owner, value, depth) if _is_text(text)]
        return forms


def _is_text(text: str) -> bool:
    """Is it more than a word or a hole?"""
    return len(HOLE.sub("", text).split()) > 1


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The expressions of which each may be what this one says."""
    match node:
        case ast.IfExp(body=body, orelse=other):
            return [body, other]
        case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values) | ast.Dict(values=values):
            return values
        case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.Await(value=value):
            return [value]
        case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.SetComp(elt=value) | ast.DictComp(value=value):
            return [value]
        case ast.Subscript(value=value):
            return [value]
    return []


def _fill(form: str, value: str) -> str:
    """The form with its first `%s` written out."""
    hit = _PERCENT.search(form)
    return form[: hit.start()] + value + form[hit.end() :] if hit else form


def _carries(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr.strip("_") in CARRIERS


def _caller(module: Module, function: Function) -> str:
    """The name by which a function is called: its class's where it makes an instance."""
    parent = module.parents.get(function)
    return parent.name if function.name == "__init__" and isinstance(parent, ast.ClassDef) else function.name


@cache
def _nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(scope))


def _values(scope: ast.AST, name: str, *, deep: bool = True) -> Iterator[ast.expr]:
    """The expressions that a name is set to, grows by or runs through."""
    for node in _nodes(scope) if deep else ast.iter_child_nodes(scope):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        yield value
                    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        pairs = zip(target.elts, value.elts, strict=False)
                        yield from (each for left, each in pairs if isinstance(left, ast.Name) and left.id == name)
            case (
                ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name(id=found), value=value)
                | ast.NamedExpr(target=ast.Name(id=found), value=value)
                | ast.For(target=ast.Name(id=found), iter=value)
                | ast.comprehension(target=ast.Name(id=found), iter=value)
            ) if found == name:
                yield value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr="append" | "extend"), args=[value]) if (
                found == name
            ):
                yield value


def _hole(node: ast.expr) -> str:
    """`⟨path⟩` of `str(path)`, of `self.path` and of `path`; else `⟨…⟩`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"⟨{name.strip('_')}⟩"
        case ast.Call(func=ast.Name(id="str" | "len" | "sorted" | "list" | "repr"), args=[inner, *_]):
            return _hole(inner)
        case ast.Subscript(value=inner):
            return _hole(inner)
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner]):
            return _hole(inner)
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return f"⟨{name.strip('_')}⟩" if len(name) > 3 else "⟨…⟩"
    return "⟨…⟩"


def tidy(text: str) -> str:
    """One line, holes that touch made one."""
    text = re.sub(r"(?:⟨[^⟩]*⟩){2,}", "⟨…⟩", " ".join(text.split()))
    return text.strip(" ;:,")


def _error_names(modules: Sequence[Module]) -> frozenset[str]:
    """Our error classes: each with one of `BASES` above it."""
    above = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    names: set[str] = set(BASES)
    size = 0
    while size != len(names):
        size = len(names)
        names |= {name for name, bases in above.items() if bases & (names | {"Exception"})}
    return frozenset(names)


def collect(root: Path = ROOT) -> list[Message]:
    """The messages of packages/*/src."""
    modules = []
    for package in sorted((root / "packages").iterdir()):
        if package.name in LEFT_OUT or not (package / "src").is_dir():
            continue
        for file in sorted((package / "src").rglob("*.py")):
            inside = file.relative_to(package / "src")
            modules.append(Module.parse(file, str(Path(package.name, *inside.parts[1:]))))
    return [message for message in Collector(modules).messages() if message.module != FORECAST]


if __name__ == "__main__":
    for message in collect():
        print(f"{message.module}: {message.text}")
