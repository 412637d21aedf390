"""The house: few modules side by side, no import in a circle, no class name with two meanings."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "server", "client", "models", "benchmarks", "loadtest", "deploy", "examples")
WIDEST, WIDEST_OF_TESTS = 16, 25  # modules side by side, `__init__` aside


def modules(*packages: str) -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, late ones and those for types alone included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
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


def class_names(path: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]


def test_no_folder_is_wide() -> None:
    found = [*modules(*PACKAGES).values(), *modules("tests").values()]
    widths = Counter(str(path.parent.relative_to(ROOT)) for path in found if path.name != "__init__.py")
    limits = {folder: WIDEST_OF_TESTS if folder.startswith("tests") else WIDEST for folder in widths}
    assert {folder: width for folder, width in widths.items() if width > limits[folder]} == {}


def test_no_import_runs_in_a_circle() -> None:
    known = modules(*PACKAGES)
    graph = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > 1000, "the ruler sees imports"
    assert circle(graph) == []


def test_no_class_name_has_two_meanings() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in modules(*PACKAGES).items():
        for name in class_names(path):
            found[name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


@pytest.mark.parametrize("package", [name for name, path in modules(*PACKAGES).items() if path.name == "__init__.py"])
def test_every_package_says_what_it_owns(package: str) -> None:
    assert ast.get_docstring(ast.parse(modules(*PACKAGES)[package].read_text("utf-8")))


def test_the_rulers_measure() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert "FinishReason" in class_names(ROOT / "engine" / "types.py")
    known = modules("engine")
    assert "engine.types" in imported(ROOT / "engine" / "engine.py", known)
    assert "engine.control.learned" in imported(ROOT / "engine" / "engine.py", known)
