"""Every promise of the page on reproducibility names a test, and that test exists under its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reproducibility.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
ITEMS = re.findall(r"^- (.*(?:\n  .*)*)", PAGE, re.MULTILINE)
UNTESTABLE = "**Another CPU"


@pytest.mark.parametrize("item", ITEMS)
def test_each_promise_names_its_test(item: str) -> None:
    assert re.search(r"`tests/[\w/]+\.py::\w+`", item) or item.startswith(UNTESTABLE)


def test_nothing_is_promised_outside_of_the_list() -> None:
    assert len(ITEMS) > 25
    rest = re.sub(r"^(- .*(?:\n  .*)*|#.*)$", "", PAGE, flags=re.MULTILINE)
    assert len(rest.split()) < 80, "the page has grown a text that names no test"


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_is_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
