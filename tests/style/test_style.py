"""Limits on the length of functions and files, and no import circles. Layers are import-linter's, the rest is ruff's.

A function's length is counted in lines of code: comments, docstrings and blank lines are free.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ("engine", "server", "client", "models")  # as parts of the package pilotfish
PACKAGES = (*INSTALLED, "benchmarks", "loadtest", "deploy", "examples")

LONGEST_FUNCTION = 60
LONGEST_FILE = 600


@dataclass(frozen=True)
class Function:
    """A function of ours and how many lines of code it has, its signature included."""

    where: str
    lines: int


def modules(*packages: str) -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    files = [path.relative_to(ROOT) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    names = (".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files)
    roots = ("pilotfish." if path.parts[0] in INSTALLED else "" for path in files)
    return {root + name: ROOT / path for root, name, path in zip(roots, names, files, strict=True)}


OURS = modules(*PACKAGES)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def statements(path: Path) -> list[ast.stmt]:
    """All of a file, nested ones too."""
    found, inside = [], [tree(path)]
    while inside:
        node = inside.pop()
        fields = (getattr(node, name, ()) for name in ("body", "orelse", "finalbody", "handlers", "cases"))
        inner = [child for each in fields for child in each]
        found += [child for child in inner if isinstance(child, ast.stmt)]
        inside += inner
    return found


def nodes(path: Path, *kinds: type[ast.stmt]) -> list:
    return [node for node in statements(path) if isinstance(node, kinds)]


def lines_of(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def functions(path: Path) -> list[Function]:
    """Every function and method in a file, nested ones too."""
    lines = enumerate(path.read_text("utf-8").split("\n"), 1)
    code = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}
    for node in nodes(path, ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= lines_of(node)
    return [
        Function(f"{path.relative_to(path.parents[1])}:{node.lineno} {node.name}", len(code & lines_of(node)))
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
    ]


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, late ones and those for types alone included."""
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in known else node.module for name in names if name in known or node.module in known
            )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_function_is_long():
    found = [function for path in [*OURS.values(), *modules("tests").values()] for function in functions(path)]
    assert len(found) > 1000
    assert [function for function in found if function.lines > LONGEST_FUNCTION] == []


def test_no_file_is_long():
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in OURS.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_modules_have_one_name():
    """`engine` can be imported as well where the repository is the working directory: twice the same code."""
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in modules(*PACKAGES, "tests").values()
        for node in nodes(path, ast.Import, ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.partition(".")[0] in INSTALLED
    }
    assert found == set()


def test_no_import_runs_in_a_circle():
    graph = {name: set(imported(path, OURS)) - {name} for name, path in OURS.items()}
    assert sum(map(len, graph.values())) > 1000, "the test sees imports"
    assert circle(graph) == []


def test_these_tests_measure(tmp_path):
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert {"pilotfish.engine.types", "pilotfish.engine.control.learned"} <= set(
        imported(ROOT / "engine" / "engine.py", modules("engine"))
    )
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
    assert functions(path) == [
        Function("package/sample.py:4 short", 2),
        Function("package/sample.py:13 text", 4),
    ]
