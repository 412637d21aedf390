"""docs/features.md shows the tests that there are, each passed when it was written."""

from __future__ import annotations

from pathlib import Path

from tests.exactness import test_options
from tests.features import HEAD, tables

PAGE = Path("docs/features.md")


def test_the_table_is_that_of_the_tests() -> None:
    """A failed cell shows by itself; this fails when an option, a condition or a proposer came or went."""
    file = "tests/exactness/test_options.py"
    functions = {
        "test_each_option_alone": test_options.ALONE,
        "test_each_condition": test_options.CONDITIONS,
        "test_each_answer_of_a_conversation": test_options.ANSWERS,
        "test_each_prediction": test_options.PREDICTIONS,
        "test_prompt_logprobs_crossed": test_options.CROSSED,
        "test_prefix_cache_crossed": test_options.TURNS,
    }
    passed = {
        f"{file}::{function}[{row}-{proposer}]": True
        for function, rows in functions.items()
        for row in rows
        for proposer in test_options.PROPOSERS
    }
    assert PAGE.read_text() == HEAD + "".join(tables(passed)), "run `make features`"
