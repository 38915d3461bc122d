"""Language of `task.filter`: Python expressions over the columns of a row.

    level >= 3 and source in ("gsm8k", "math")
    len(answer) < 20 and not prompt.startswith("#")
    row.get("score", 0) > 0.5 or row["needs review"]

Expressions cannot reach files, modules or randomness.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import nearest

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "len": len,
    "str": str,
    "int": int,
    "float": float,
    "abs": abs,
    "min": min,
    "max": max,
}
METHODS: Final = ("lower", "upper", "strip", "startswith", "endswith", "count", "split", "get")

_NODES: Final = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.Is, ast.IsNot, ast.In, ast.NotIn, ast.Constant, ast.Tuple, ast.List, ast.Load),
    *(ast.Name, ast.Subscript, ast.Slice, ast.Call, ast.Attribute),
)

Filter = Callable[[Mapping[str, Any]], bool]


def compile_filter(text: str) -> Filter:
    """Return a predicate over rows. Raises ConfigError for an invalid expression.

    The predicate raises TaskError for missing columns and values that do not compare.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"task.filter: `{text}` is not an expression: {reason}") from error
    for node in ast.walk(tree):
        _check(node, text)
    code = compile(tree, "task.filter", "eval")

    def keeps(row: Mapping[str, Any]) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {}, **FUNCTIONS}, {"row": row, **row}))
        except NameError as error:
            raise _unknown(str(error.name), row) from None
        except KeyError as error:
            raise _unknown(str(error.args[0]), row) from None
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise TaskError(f"task.filter: {error}", hint=f"of `{text}`") from None

    return keeps


def _check(node: ast.AST, text: str) -> None:
    if not isinstance(node, _NODES):
        raise ConfigError(
            f"task.filter: `{text}` holds {type(node).__name__}, which is not supported",
            hint="supported: comparisons, and, or, not, in, arithmetic, constants, columns",
        )
    if isinstance(node, ast.Attribute) and node.attr not in METHODS:
        raise ConfigError(
            f"task.filter: `.{node.attr}` is not supported", hint=f"{', '.join(METHODS)} are"
        )
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Name) and called.id not in FUNCTIONS:
        raise ConfigError(
            f"task.filter: no function `{called.id}`",
            hint=nearest(called.id, FUNCTIONS) or f"there are {', '.join(FUNCTIONS)}",
        )
    if not isinstance(called, ast.Name | ast.Attribute) or node.keywords:
        raise ConfigError(f"task.filter: `{ast.unparse(node)}` is not a supported call")


def _unknown(name: str, row: Mapping[str, Any]) -> TaskError:
    return TaskError(
        f"task.filter: no column `{name}`",
        hint=nearest(name, row) or f"it has {', '.join(f'`{column}`' for column in row)}",
    )
