"""The limits on size that keep this code readable, and the order of the house; what ruff checks is not repeated here.

A function's length is counted in lines that hold code: comments, docstrings and blank lines are free. Few modules lie
side by side, no import runs in a circle, and no class name has two meanings.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "server", "client", "models", "benchmarks", "loadtest", "deploy", "examples")

MEDIAN_FUNCTION = 10
NINETIETH_PERCENTILE = 30
LONGEST_FUNCTION = 60
LONGEST_FILE = 450  # a noun that needs more is two
WIDEST, WIDEST_OF_TESTS = 16, 25  # modules side by side, `__init__` aside


@dataclass(frozen=True)
class Function:
    """A function of ours and how many lines of code it has, its signature included."""

    where: str
    lines: int


def modules(*packages: str) -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


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


def test_no_function_is_long_and_most_are_short():
    of_tests = [function for path in modules("tests").values() for function in functions(path)]
    ours = [function for path in OURS.values() for function in functions(path)]
    lines = [function.lines for function in ours]
    assert [f for f in ours + of_tests if f.lines > LONGEST_FUNCTION] == []
    assert statistics.median(lines) <= MEDIAN_FUNCTION
    assert statistics.quantiles(lines, n=10)[-1] <= NINETIETH_PERCENTILE


def test_no_file_is_long():
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in OURS.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_every_module_says_what_it_is():
    assert [name for name, path in OURS.items() if not ast.get_docstring(tree(path))] == []


def test_no_folder_is_wide():
    found = [*OURS.values(), *modules("tests").values()]
    widths = Counter(str(path.parent.relative_to(ROOT)) for path in found if path.name != "__init__.py")
    limits = {folder: WIDEST_OF_TESTS if folder.startswith("tests") else WIDEST for folder in widths}
    assert {folder: width for folder, width in widths.items() if width > limits[folder]} == {}


def test_no_import_runs_in_a_circle():
    graph = {name: set(imported(path, OURS)) - {name} for name, path in OURS.items()}
    assert sum(map(len, graph.values())) > 1000, "the ruler sees imports"
    assert circle(graph) == []


def test_no_class_name_has_two_meanings():
    found = defaultdict(list)
    for module, path in OURS.items():
        for node in nodes(path, ast.ClassDef):
            found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
    assert "FinishReason" in found, "the ruler sees classes"


def test_the_rulers_measure(tmp_path):
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert {"engine.types", "engine.control.learned"} <= set(imported(ROOT / "engine" / "engine.py", modules("engine")))
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
