"""A target held by two GPUs (NCCL) gives the tokens of one GPU, in float32."""

from __future__ import annotations

import pytest
import torch

# A GPU machine may have less than the program needs.
pytest.importorskip("llguidance", reason="llguidance is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

from tests.exactness.test_shares import PAGES, assert_tokens_of_one, run_in_shares

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_in_shares(tmp_path_factory.mktemp("shares"), "cuda")


@pytest.mark.parametrize("family", PAGES)
def test_two_gpus_give_the_tokens_of_one(folder, family):
    assert_tokens_of_one(folder, family, "cuda")
