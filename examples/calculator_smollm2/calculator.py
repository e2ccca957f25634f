"""A calculator for whole numbers: Python's own parser reads the expression, and nothing else is run."""

import ast
import operator

__all__ = ["calculate"]

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MOST_CHARACTERS = 60


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers with `+`, `-`, `*` and brackets. Raises ValueError for any other."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters; at most {MOST_CHARACTERS} are calculated")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            value: int = OPERATIONS[type(operation)](_value(left), _value(right))
            return value
    raise ValueError(f"{ast.unparse(node)!r} is not calculated; write whole numbers with +, - and *")
