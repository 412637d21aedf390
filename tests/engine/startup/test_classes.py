"""Every class of causal language models in transformers runs as docs/models.md says, or is refused for that reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.class_table import WAYS, outcome, read
from tests.classes import KINDS

PAGE = Path("docs/models.md").read_text("utf-8")
WRITTEN = read(PAGE)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_class_and_most_of_them_run() -> None:
    running = {KINDS[kind] for kind, found in WRITTEN.items() if found in WAYS}
    assert len(running) >= 0.85 * len({KINDS[kind] for kind in WRITTEN})


# `make classes` runs all; here are one of each outcome, and each sixth.
SOME = {*list(KINDS)[::6], *{found: kind for kind, found in WRITTEN.items() if kind in KINDS}.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SOME))
def test_each_runs_as_the_page_says(kind: str) -> None:
    found = outcome(kind)  # which asserts that its tokens are those of `generate`
    if f"transformers {transformers.__version__}," in PAGE:
        assert found == WRITTEN[kind], "run `make classes`"
