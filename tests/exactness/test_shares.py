"""A target held by two processes (gloo, on a CPU) gives the tokens of one: plain, drafted, cached, cut up, preempted.

Drafts, chunks and company do not change a bit of what two processes compute, in int8 neither.

Sums of two shares round otherwise than one long sum: logits differ in the last bits of float32 (about 3e-6 here), and a
near-tie may fall the other way. With these weights, seeds and lengths there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pilotfish.engine.kv.arena import KVLayout
from pilotfish.engine.llm import LLM
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.models import embedded_draft, embedded_target
from tests import families, zoo
from tests.exactness import shared_target

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
# Page size and pages: too few for all; and enough, but so small that one message does not hold their numbers.
PAGES = {"llama": (4, 60), "qwen3": (1, 1400), "deepseek-v3": (4, 400)}
ROUNDED = "embedded"  # a pair whose shares have whole vectors, with weights, keys and values in int8


def run_in_shares(folder: Path, device: str) -> Path:
    """Save each family, and have two processes say what comes of the requests."""
    for family in PAGES:
        families.save(family, folder / family)
    (folder / ROUNDED).mkdir()
    for name, model in (("target", embedded_target()), ("draft", embedded_draft())):
        (folder / ROUNDED / name).symlink_to(model)
    # By loopback: the name of a machine that runs tests may be nobody's.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launcher += ["--nproc-per-node=2"]
    given: dict[str, object] = {family: options(family, device) for family in PAGES}
    if device == "cpu":
        given[ROUNDED] = {"weights": "int8", "kv_cache_dtype": "int8", "max_batch_size": 24, "device": device}
    ran = subprocess.run(
        [*launcher, "-m", "tests.exactness.shared_target", str(folder), json.dumps(given)],
        capture_output=True, text=True, timeout=500, cwd=ROOT, check=False,
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {}),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


def options(family: str, device: str) -> dict[str, object]:
    page_size, pages = PAGES[family]
    architecture = architecture_for(zoo.family_config(family))
    assert architecture is not None
    layout = KVLayout(architecture.kv, torch.float32)
    gib = (pages * page_size * 1.5 * layout.bytes_per_token + 1) / 2**30  # half a target's and a whole draft's
    batch = {"max_batch_size": 48, "max_batch_tokens": 64, "num_draft_tokens": 8}
    return {"page_size": page_size, "kv_memory": gib, "device": device, **batch}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_in_shares(tmp_path_factory.mktemp("shares"), "cpu")


def brought(folder: Path, family: str) -> dict[str, dict[str, object]]:
    return json.loads((folder / family / "out.json").read_text("utf-8"))


@pytest.mark.parametrize("family", PAGES)
def test_two_processes_give_the_tokens_of_one(folder, family):
    assert_tokens_of_one(folder, family, "cpu")


def assert_tokens_of_one(folder, family, device):
    plain = {"proposer": "none", "prefix_cache": False, "max_model_len": shared_target.LONGEST}
    alone = LLM(folder / family / "target", threads=1, device=device, loop="plain", **plain)
    want = [done for prompt, law in shared_target.requests() for done in alone.generate([prompt], law)]
    came = brought(folder, family)["came"]
    assert len(came) == len(shared_target.ASKED)
    for name, got in came.items():
        for ours, theirs in zip(got, shared_target.said(want), strict=True):
            assert_same(ours, theirs, name)


def test_drafts_and_what_is_cached_change_no_bit(folder):
    plain, *drafted = brought(folder, ROUNDED)["came"].values()
    for came in drafted:
        assert came == plain
    assert brought(folder, ROUNDED)["counts"]["accepted"] > 0


@pytest.mark.parametrize("family", PAGES)
def test_that_was_what_it_says(folder, family):
    counts = brought(folder, family)["counts"]
    assert (counts["preempted"] > 0) == (family == "llama")
    assert counts["prefix_hits"] > 0
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["draft_failures"] == 0
    assert counts["longest_message"] > 512, "none was sent in two parts"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_holds_half_of_the_keys(folder, family):
    assert brought(folder, family)["kv_heads"] * 2 == zoo.family_config(family).num_key_value_heads


def assert_same(got, want, name):
    for field in ("token_ids", "finish_reason"):
        assert got[field] == want[field], (name, field)
    for field in ("logprobs", "prompt_logprobs"):
        assert flat(got[field]) == pytest.approx(flat(want[field]), abs=1e-4), (name, field)


def flat(logprobs):
    return [candidate["logprob"] for one in logprobs or () if one for candidate in (one, *one["top"])]
