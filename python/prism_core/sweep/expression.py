"""Arithmetic in a sweep file: whole numbers, names of its values, comparisons. Nothing else is evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from prism_core.errors import ConfigError

Value: TypeAlias = str | int | float | bool

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
#: Longest expression, characters.
_LONGEST = 1000


def evaluate(text: str, values: Mapping[str, Value], field: str) -> Value:
    """The value of an expression.

    Args:
        text: Numbers, texts, names, `+ - * / // %`, comparisons, `and`, `or`, `not`.
        values: What the names stand for.
        field: Where the expression stands; errors name it.

    Raises:
        ConfigError: It is none, names something unknown, or cannot be worked out.
    """
    if len(text) > _LONGEST:
        raise ConfigError(f"{field} is an expression of {len(text)} characters: at most {_LONGEST}")
    try:
        found: Value = _Evaluator(values, field).of(ast.parse(text, mode="eval").body)
        return found
    except (SyntaxError, RecursionError) as error:
        raise ConfigError(f"{field} is {text!r}: not an expression such as tp * pp <= 64") from error
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"{field} is {text!r}: {error}") from error


class _Evaluator:
    def __init__(self, values: Mapping[str, Value], field: str) -> None:
        self._values = values
        self._field = field

    def of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
            return node.value
        if isinstance(node, ast.Name):
            return self._value(node.id)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self.of(node.left), self.of(node.right)
            if isinstance(left, str) or isinstance(right, str):
                raise TypeError("texts can only be compared")
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.BoolOp):
            found = [bool(self.of(value)) for value in node.values]
            return all(found) if isinstance(node.op, ast.And) else any(found)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        raise ConfigError(f"{self._field} has {ast.unparse(node)!r}: only numbers, names, arithmetic and comparisons")

    def _value(self, name: str) -> Value:
        if name not in self._values:
            raise ConfigError(f"{self._field} names {name!r}: it is none of {', '.join(self._values)}")
        return self._values[name]

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) else value

    def _compare(self, node: ast.Compare) -> bool:
        left = self.of(node.left)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.of(comparator)
            if type(op) not in _COMPARE:
                raise ConfigError(f"{self._field} has {ast.unparse(node)!r}: compare with == != < <= > >=")
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True
