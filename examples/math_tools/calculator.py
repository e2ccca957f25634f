"""The agent's tool: arithmetic, and nothing else, with Python's own rules of precedence."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

__all__ = ["calculate", "calculator"]

OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
MOST_CHARACTERS, LARGEST = 200, 1e12


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return f"{calculate(expression):.10g}"


def calculate(expression: str) -> float:
    """The value of an expression of numbers, + - * / // % ** and parentheses. 1,234 and 1_234 are numbers.

    Raises `ValueError` with a sentence where it is anything else, divides by zero, or goes beyond 1e12.
    """
    try:
        if len(expression) > MOST_CHARACTERS:
            raise ValueError
        value: float = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError(f"{expression} divides by zero") from None
    except OverflowError:
        raise ValueError(f"{expression} is too large") from None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{expression} is no arithmetic expression") from None
    return value


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Any = value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            first, second = _value(left), _value(right)
            if isinstance(sign, ast.Pow) and abs(second) > 64:
                raise OverflowError
            result = OPERATIONS[type(sign)](first, second)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATIONS:
            result = OPERATIONS[type(sign)](_value(operand))
        case _:
            raise ValueError
    if abs(result) > LARGEST:  # a complex power has a size, too
        raise OverflowError
    return result
