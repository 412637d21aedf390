"""The limits on size that keep this code readable; what ruff already checks is not repeated here.

A function's length is counted in lines that hold code: comments, docstrings and blank lines are free.
"""

from __future__ import annotations

import ast
import statistics
import tokenize
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "server", "client", "models", "benchmarks", "loadtest", "deploy")

MEDIAN_FUNCTION = 10
NINETIETH_PERCENTILE = 30
LONGEST_FUNCTION = 60
LONGEST_FILE = 450  # a noun that needs more is two

# Layout and docstrings; everything else makes a line a line of code.
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Function:
    """A function of ours and how many lines of code it has, its signature included."""

    where: str
    lines: int


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code."""
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in _NOT_CODE and t.string]
    return set(chain.from_iterable(range(t.start[0], t.end[0] + 1) for t in tokens)) - docstring_lines(path)


def docstring_lines(path: Path) -> set[int]:
    """Numbers of the lines of strings that stand alone as statements."""
    strings = [
        node
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def functions(path: Path) -> list[Function]:
    """Every function and method in a file, nested ones too."""
    code = code_lines(path)
    return [
        Function(
            f"{path.relative_to(path.parents[1])}:{node.lineno} {node.name}",
            len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))),
        )
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.fixture(scope="module")
def all_functions() -> list[Function]:
    return [function for path in FILES for function in functions(path)]


def test_there_is_something_to_measure(all_functions):
    assert len(FILES) > 20
    assert len(all_functions) > 100


def test_no_function_is_long(all_functions):
    of_tests = [function for path in sorted((ROOT / "tests").rglob("*.py")) for function in functions(path)]
    assert [f for f in [*all_functions, *of_tests] if f.lines > LONGEST_FUNCTION] == []


def test_most_functions_are_short(all_functions):
    lines = [f.lines for f in all_functions]
    assert statistics.median(lines) <= MEDIAN_FUNCTION
    assert statistics.quantiles(lines, n=10)[-1] <= NINETIETH_PERCENTILE


def test_no_file_is_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), "begins without a docstring"


def test_the_ruler_measures(tmp_path):
    path = tmp_path / "package" / "sample.py"
    path.parent.mkdir()
    path.write_text(
        '''"""A module."""


def short(x):
    """Two lines,

    of code.
    """
    # not this one
    return x


async def text():
    return """one
    two
    """
'''
    )
    assert [(f.where, f.lines) for f in functions(path)] == [
        ("package/sample.py:4 short", 2),
        ("package/sample.py:13 text", 4),
    ]
