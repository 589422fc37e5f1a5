"""Looks up the jit function and the statement that a line of source belongs to."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """The innermost function of a line, "" if none, and the text of its innermost statement."""

    function: str
    statement: str


@functools.cache
def lines_of(path: str) -> dict[int, Line]:
    """Line number -> `Line`, for every line of a file that belongs to a statement of a function."""
    if not path.endswith(".py") or not Path(path).is_file():
        return {}
    text = Path(path).read_text()
    found: dict[int, Line] = {}
    _visit(ast.parse(text), "", text.splitlines(), found)
    return found


def look_up(path: str, number: int) -> Line:
    """The function and statement of a line."""
    return lines_of(path).get(number, Line("", ""))


def _visit(node: ast.AST, function: str, text: list[str], found: dict[int, Line]) -> None:
    """Record the statements of a tree, outer ones first, so that inner ones override their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            _visit(child, child.name, text, found)
            continue
        if isinstance(child, ast.stmt) and child.end_lineno is not None:
            inner = [s.lineno for s in ast.walk(child) if isinstance(s, ast.stmt) and s is not child]
            last = min(inner) - 1 if inner else child.end_lineno
            statement = "\n".join(text[child.lineno - 1 : last])
            for number in range(child.lineno, last + 1):
                found[number] = Line(function, statement)
        _visit(child, function, text, found)
