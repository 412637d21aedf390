"""Writes docs/features.md from a test run: a cell is the test that passed, or the word that it did not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

HEAD = """# Features under speculation

Written by `make features` from a test run; a test compares it with the list of tests.

Rows are options and conditions of a request, columns are proposers. A cell is a test of
`tests/exactness/test_options.py` that passed: with this proposer, tokens, text, finish reason, stop position, usage,
seed and log-probabilities are those of plain decoding, for several numbers of drafts. `right` and `wrong` are
proposers of the tests that are always or never right; `mapped` is `model` with another vocabulary.

`test_each_answer_of_a_conversation`: calls of functions and reasoning, in the format of Hermes; all formats are in
`tests/exactness/test_tools.py`. `test_each_prediction`: outputs that the caller predicted. `echo` over HTTP is
`prompt_logprobs` here.

The last two tables combine options. `test_prompt_logprobs_crossed`: log-probabilities of prompts, some
of them with several outputs, are those of one pass of transformers. `test_prefix_cache_crossed`: the output of a prompt
that is repeated, or that continues an earlier output, is that of plain decoding, with as many cached tokens.
"""


class FeatureTable:
    """A pytest plugin: collects the outcome of each test that is marked `feature`."""

    def __init__(self, path: Path) -> None:
        self._path, self._passed = path, {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._passed = {item.nodeid: False for item in items if item.get_closest_marker("feature")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.nodeid in self._passed:
            self._passed[report.nodeid] = report.passed

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(HEAD + "".join(tables(self._passed)))


def tables(passed: dict[str, bool]) -> Iterator[str]:
    """One table per test function, in the order of the tests."""
    functions = dict.fromkeys(name.partition("[")[0] for name in passed)
    for function in functions:
        cells = {tuple(_parameters(name)): ok for name, ok in passed.items() if name.partition("[")[0] == function}
        yield f"\n## `{function.partition('::')[2]}`\n\n" + _table(cells)


def _parameters(name: str) -> Iterable[str]:
    """tests/...::test[top_p-ngram] -> top_p, ngram."""
    return name.partition("[")[2].removesuffix("]").rsplit("-", 1)


def _table(cells: dict[tuple[str, ...], bool]) -> str:
    rows, columns = dict.fromkeys(row for row, _ in cells), dict.fromkeys(column for _, column in cells)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        told = [f"`[{row}-{column}]`" if cells[row, column] else "**failed**" for column in columns]
        lines.append(f"| {row} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"
