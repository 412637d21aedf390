"""With the layer inside of its own checkpoint (mtp) a target gives the tokens of plain decoding.

The checkpoints are of targets whose next token is mostly a function of the last one, and of layers that compute that
function: so of the drafts most are accepted, and some are not.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.runner import layout_of_model
from engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from engine.startup.build import build_engine
from engine.types import Request, Sequence
from tests import fakes, zoo
from tests.covering import some
from tests.engine.proposers.heads import mtp_checkpoints as checkpoints
from tests.engine.proposers.heads.mtp_checkpoints import FAMILIES

NEW_TOKENS = 16
LAWS = (
    SamplingParams(max_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=NEW_TOKENS),
    SamplingParams(temperature=1.3, seed=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=NEW_TOKENS, repetition_penalty=1.3, min_tokens=12),
)
OPTIONS = {"warm_up_seconds": 0, "threads": 1, "max_batch_size": 12}
MOST_DRAFTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@lru_cache
def target_of(folder: Path, family: str) -> str:
    return checkpoints.planted(family, folder / family, noise=0.05).folder


def requests(**speculation: object) -> list[Request]:
    """One for each number of drafts, so that all of them are in one batch."""
    prompts = zoo.prompts(MOST_DRAFTS + 1)
    prompts[0] = prompts[0][:1]
    return [
        Request(
            request_id=str(k),
            token_ids=tuple(prompt),
            sampling=LAWS[k % len(LAWS)],
            speculation=SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=k, **speculation),
        )
        for k, prompt in enumerate(prompts)
    ]


@lru_cache
def plain(target: str, **options: object) -> dict[str, list[int]]:
    """Each request by itself, one token at a time."""
    engine = build_engine(EngineConfig(target=target, proposer="none", **OPTIONS, **options))
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in requests()}


def engine_of(target: str, **options: object) -> Engine:
    return build_engine(EngineConfig(target=target, mtp=True, proposer="mtp", **OPTIONS | options))


def assert_plain(engine: Engine, want: dict[str, list[int]], asked: list[Request] | None = None) -> None:
    done = fakes.run(engine, asked or requests())
    assert done.tokens == want
    drafted, accepted = (sum(getattr(f.stats, n) for f in done.finished.values()) for n in ("drafted", "accepted"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", some(FAMILIES, ["deepseek-v3"]))
def test_any_k_in_one_batch(folder: Path, family: str) -> None:
    """In chunks; the second time the prompts are cached, and their features are not seen again."""
    target = target_of(folder, family)
    engine = engine_of(target, max_batch_tokens=28, page_size=4)
    for _ in range(2):
        assert_plain(engine, plain(target))
    assert_plain(engine_of(target), plain(target))


WAYS = (("weights", "int8"), ("dtype", "bfloat16"), ("kv_cache_dtype", "int8"), ("reproducible", True),
        ("attention", "reference"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm-4-moe", "qwen-3.5"])
@pytest.mark.parametrize("option", WAYS)
def test_other_ways_to_hold_a_target(folder: Path, family: str, option: tuple[str, object]) -> None:
    target, options = target_of(folder, family), dict([option])
    assert_plain(engine_of(target, **options), plain(target, **options))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "qwen-3-next"])
def test_preempted(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few steps one of the sequences gives up its features, keys, values and states, and makes them again."""
    target = target_of(folder, family)
    engine = engine_of(target, page_size=4)
    steps, lost, step, scheduler = count(1), list[Sequence](), engine.step, engine.scheduler

    def preempting() -> object:
        if next(steps) % 3 == 0 and scheduler.running:
            lost.append(scheduler.running[0])
            scheduler._preempt(lost[-1])
        return step()

    monkeypatch.setattr(engine, "step", preempting)
    assert_plain(engine, plain(target))
    assert len(lost) > 2


@pytest.mark.slow
def test_greedy_under_the_rejection_rule(folder: Path) -> None:
    target = target_of(folder, "glm-4-moe")
    greedy = [r for r in requests(verification=Verification.REJECTION) if not r.sampling.temperature]
    assert_plain(engine_of(target), {r.request_id: plain(target)[r.request_id] for r in greedy}, greedy)


@pytest.mark.slow
def test_a_layer_of_random_weights(folder: Path) -> None:
    """None of its drafts is kept, or hardly any."""
    target = checkpoints.save("qwen-3-next", folder / "random").folder
    assert fakes.run(engine_of(target), requests()).tokens == plain(target)


def test_the_arena_of_a_latent_layer_keeps_latents(folder: Path) -> None:
    engine = engine_of(target_of(folder, "deepseek-v3"))
    layout = layout_of_model(engine.proposers.by_name["mtp"].head._model)
    assert [kv.is_latent for kv in layout.layers if kv is not None] == [True]
