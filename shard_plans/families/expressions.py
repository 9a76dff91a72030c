"""Expressions of family tables over config.json: a fixed small grammar, walked, never run as code.

Numbers, strings, lists, true/false/none; config keys with `.nested` and `[index]`; `layer`; + - * // %;
comparisons, `in`, `and` / `or` / `not`; len(). A table may come from a stranger, so length and nesting are limited
and nothing that grows (powers, repeated strings) is allowed.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from shard_plans.errors import ConfigError, FamilyError

MAX_LENGTH = 300

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CONSTANTS = {"true": True, "false": False, "none": None}


class MissingKey(ConfigError):
    """The expression names a config key that isn't there or is null."""


def parse(text: str) -> ast.expr:
    """The syntax tree of an expression; FamilyError where it leaves the grammar."""
    if len(text) > MAX_LENGTH:
        raise FamilyError(f"expression of {len(text)} characters, at most {MAX_LENGTH} are allowed: {text[:60]!r}...")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python itself calls doubtful: 1if, an unknown escape
            tree = ast.parse(text.strip(), mode="eval").body
    except (Warning, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FamilyError(f"expression {text!r} can't be read: {error}") from error
    for node in ast.walk(tree):
        if not _allowed(node):
            raise FamilyError(f"expression {text!r}: {type(node).__name__} isn't part of the grammar")
    return tree


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float, str)) or node.value is None
    if isinstance(node, ast.BinOp):
        return type(node.op) in _ARITHMETIC
    if isinstance(node, ast.Compare):
        return all(type(op) in _COMPARISONS for op in node.ops)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1 and not node.keywords
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.Not, ast.USub))
    return isinstance(
        node,
        (ast.Name, ast.Attribute, ast.Subscript, ast.List, ast.Tuple, ast.BoolOp, ast.operator, ast.cmpop, ast.boolop,
         ast.unaryop, ast.expr_context),
    )  # fmt: skip


def evaluate(text: str, config: Mapping[str, Any], scope: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression. Names are looked up in `scope` first, then in the config.

    Raises MissingKey where a key is absent or null, ConfigError where the values don't fit the operation.
    """
    try:
        return _value(parse(text), {**config, **(scope or {})}, text)
    except (TypeError, IndexError, ZeroDivisionError, KeyError, ValueError, OverflowError) as error:
        raise ConfigError(f"config.json: {text!r} can't be computed: {error}") from error


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    def walk(child: ast.expr) -> Any:
        return _value(child, names, text)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id.lower() in _CONSTANTS:
            return _CONSTANTS[node.id.lower()]
        return _present(names.get(node.id), node.id, text)
    if isinstance(node, ast.Attribute):
        base = walk(node.value)
        key = ast.unparse(node)
        if not isinstance(base, Mapping):
            raise ConfigError(f"config.json: {key} is wanted, but {ast.unparse(node.value)} isn't an object")
        return _present(base.get(node.attr), key, text)
    if isinstance(node, ast.Subscript):
        return walk(node.value)[walk(node.slice)]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [walk(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = walk(node.left), walk(node.right)
        if not all(isinstance(side, (int, float)) for side in (left, right)):
            raise ConfigError(f"config.json: {text!r} wants numbers, got {left!r} and {right!r}")
        return _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        operand = walk(node.operand)
        return not operand if isinstance(node.op, ast.Not) else -operand
    if isinstance(node, ast.BoolOp):
        result: Any = None
        for value in node.values:
            result = walk(value)
            if bool(result) != isinstance(node.op, ast.And):
                break
        return result
    if isinstance(node, ast.Compare):
        left = walk(node.left)
        for op, side in zip(node.ops, node.comparators, strict=True):
            right = walk(side)
            if not _COMPARISONS[type(op)](left, right):
                return False
            left = right
        return True
    if isinstance(node, ast.Call):
        return len(walk(node.args[0]))
    raise FamilyError(f"expression {text!r}: {type(node).__name__} isn't part of the grammar")


def _present(value: Any, key: str, text: str) -> Any:
    if value is None:
        purpose = "" if key == text else f" for {text!r}"
        raise MissingKey(f"config.json lacks {key!r}, which the family table needs{purpose}")
    return value


def first_value(texts: str | int | list[Any], config: Mapping[str, Any], scope: Mapping[str, Any] | None = None) -> Any:
    """The first alternative whose keys exist and are not null; MissingKey of the first one if none does."""
    missing: MissingKey | None = None
    for text in texts if isinstance(texts, list) else [texts]:
        if not isinstance(text, str):
            return text
        try:
            return evaluate(text, config, scope)
        except MissingKey as error:
            missing = missing or error
    if missing is None:
        raise FamilyError("an empty list of alternatives")
    raise missing
