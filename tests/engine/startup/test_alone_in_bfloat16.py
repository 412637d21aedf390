"""Models that run one sequence at a time: torch multiplies there, and rounds bfloat16 by the shape of a pass."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.startup.build import build_engine
from tests import fakes, zoo
from tests.class_table import ALONE, way_of
from tests.classes import tiny
from tests.families import Saved, assert_expected, cases_of, requests

pytestmark = pytest.mark.filterwarnings("ignore")
PROPOSERS = ("none", "ngram", "model")
SMALL = {"threads": 1, "max_batch_size": 8, "max_model_len": 96}


def saved_in_bfloat16(kind: str, folder: Path) -> Saved:
    """With what transformers makes of the same weights in float32."""
    model = zoo.with_large_weights(tiny(kind)).bfloat16()
    model.save_pretrained(folder / "target")
    model.save_pretrained(folder / "draft")
    return Saved(str(folder / "target"), str(folder / "draft"), cases_of(model.float()), PROPOSERS)


def test_unasked_it_is_float32_and_exact(tmp_path: Path) -> None:
    saved = saved_in_bfloat16("bloom", tmp_path)
    sizes = SMALL | {"max_batch_tokens": 21}
    engine = build_engine(EngineConfig(target=saved.target, draft=saved.draft, **sizes))
    assert (engine.dtype, way_of(engine)) == ("float32", ALONE)
    assert_expected(saved, fakes.run(engine, requests(saved, PROPOSERS)).tokens)


def test_bfloat16_by_name_is_had_and_the_log_says_what_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = saved_in_bfloat16("bloom", tmp_path)
    with caplog.at_level(logging.WARNING, "engine.startup"):
        engine = build_engine(EngineConfig(target=saved.target, dtype="bfloat16", **SMALL))
    assert engine.dtype == "bfloat16"
    assert "drafts, chunks and the prefix cache may change its tokens" in caplog.text
