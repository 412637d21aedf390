"""With drafts of any head the tokens are those of plain decoding: any K, any law, in chunks, cached and preempted.

Uno's rows of noise are written into the target's own arena: one that anything reads as text would change a token here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

import pytest
from transformers import LlamaConfig, PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from pilotfish.engine.proposers.model import first_layers
from pilotfish.engine.types import Request
from tests import adapters, fakes, heads, laws, zoo
from tests.covering import some
from tests.engine.proposers.heads import dflash_checkpoints as made
from tests.engine.proposers.heads import mtp_checkpoints

IN_C = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
HOT = SamplingParams(temperature=3.0, top_k=16, max_tokens=3, ignore_eos=True)


@dataclass(frozen=True)
class Kind:
    """A target, what drafts for it, and the law under which some of its drafts are kept and some are not."""

    proposer: str
    reference: Callable[[], PreTrainedModel]
    parts: Callable[[Path], dict[str, object]]  # of the config, written to a folder
    as_served: bool = False  # its layers run in C
    first: int = 0  # what is added to the prompts' tokens
    heat: float = 1.0  # of temperatures
    law: SamplingParams = HOT
    depth: int = 1  # drafts in a round of the law's test
    certain: int = 0  # so many of them have the target's own law
    adapters: tuple[str | None, ...] = (None,)  # of the requests, in turn
    has_draft_model: bool = False

    def target(self) -> PreTrainedModel:
        """A fresh one: some heads read its features by a hook that stays."""
        mine = zoo.ours(self.reference())
        return zoo.as_served(mine) if self.as_served else mine

    def engine(self, folder: Path, **config: object) -> Engine:
        draft = zoo.near(self.reference()) if self.has_draft_model else None
        usual = {"max_batch_size": 16, "proposer": self.proposer, "speculation": "fixed", "page_size": 8}
        options = {"target": "t"} | self.parts(folder) | usual | config
        return heads.assembled(EngineConfig(**options), self.target(), draft)


def _everyone(folder: Path) -> dict[str, object]:
    """With the head's own output and biases, or the target's, by turns."""
    eagle = heads.eagle(folder, embedding=True, fc_bias=True, qkv_bias=True)
    return {"draft": ("self:1", heads.medusa(folder, own_output=False), eagle)}


@cache
def _layers(number: int, **sizes: int) -> PreTrainedModel:
    return zoo.with_large_weights(LlamaConfig(**zoo.COMMON | {"num_hidden_layers": number} | sizes))


def _eagle3(**changes: object) -> Callable[[Path], dict[str, object]]:
    width = int(str(changes.get("hidden_size", 32)))
    return lambda folder: {"draft": heads.eagle3(folder, changes, target=width)}


@cache
def _planted() -> PreTrainedModel:
    """Flat enough that sampled tokens often differ from the likeliest, so drafts are kept and are not."""
    return made.planted_target(sharpness=2.0)


def _dflash(folder: Path) -> dict[str, object]:
    config = made.AUTHORS | {"final_logit_softcapping": 30.0}
    return {"draft": heads.save(folder, config, made.tensors())}


@cache
def _mtp(family: str) -> mtp_checkpoints.SavedWithMTP:
    return mtp_checkpoints.planted(family, Path(mkdtemp()), noise=0.05)


def _of_mtp(family: str) -> Kind:
    return Kind("mtp", lambda: _mtp(family).target, lambda _: {"target": _mtp(family).folder, "draft": "mtp"})


def _uno(folder: Path) -> dict[str, object]:
    """Small enough to be right now and then, beside adapters of the requests."""
    others, targets = adapters.write_all(folder, _layers(3, **IN_C)), [*adapters.ADAPTERS["all"][2], "lm_head"]
    return {"adapter": others, "draft": str(adapters.write(folder / "uno", _layers(3, **IN_C), 4, 0.5, targets))}


LLAMA = {"reference": lambda: zoo.reference("llama"), "parts": _everyone, "has_draft_model": True}
KINDS = {
    **{name: Kind(name, **LLAMA) for name in ("self", "medusa", "eagle")},
    "eagle3": Kind(
        "eagle", lambda: _layers(6), _eagle3(draft_vocab_size=60, norm_output=True, fc_norm=True)
    ),
    "eagle3 in C": Kind(
        "eagle", lambda: _layers(6, **IN_C), _eagle3(draft_vocab_size=80, **IN_C), as_served=True
    ),
    "dflash": Kind(
        "dflash", _planted, lambda folder: {"draft": made.planted(folder)}, first=made.FIRST, heat=3.5,
        law=SamplingParams(temperature=4.0, top_k=6, max_tokens=4, ignore_eos=True), depth=2,
    ),
    "dflash of lfm-2": Kind("dflash", lambda: zoo.reference("lfm-2"), _dflash),
    "uno": Kind(
        "uno", lambda: _layers(3, **IN_C), _uno, as_served=True, adapters=(None, "qv", "all", None, "head", "down"),
        law=SamplingParams(temperature=3.0, top_k=4, max_tokens=4, ignore_eos=True), depth=2, certain=1,
    ),
    "mtp of deepseek-v3": _of_mtp("deepseek-v3"),
    "mtp of qwen-3-next": _of_mtp("qwen-3-next"),
}  # fmt: skip
KEPT = ("eagle", "dflash", "uno", "mtp of deepseek-v3")  # whose drafts are kept now and then, in so few rounds


def laws_of(kind: Kind) -> tuple[SamplingParams, ...]:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    return tuple(
        SamplingParams(max_tokens=16, **law)
        for law in (
            {},
            {"temperature": 0.8 * kind.heat, "top_p": 0.9, "seed": 11},
            {"temperature": 1.3 * kind.heat, "seed": 0},
            {"temperature": 0.9 * kind.heat, "seed": 5, "min_tokens": 12, **penalties},
            {"frequency_penalty": 0.7, "logit_bias": {5: 2.0, 9: -100.0}, "banned_token_ids": (11, 12)},
        )
    )


def requests(kind: Kind, **speculation: object) -> list[Request]:
    """Ten, the first of a single token; each with another K unless one is given."""
    prompts = [[kind.first + token % 20 for token in p] if kind.first else p for p in zoo.prompts(10)]
    prompts[0] = prompts[0][:1]
    of_laws = laws_of(kind)
    return [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt),
            sampling=of_laws[i % len(of_laws)],
            adapter=kind.adapters[i % len(kind.adapters)],
            speculation=SpeculationParams(**{"num_draft_tokens": i % 9} | speculation),
        )
        for i, prompt in enumerate(prompts)
    ]


@cache
def plain(name: str) -> dict[str, list[int]]:
    """Each request by itself, one token at a time, over a cache that keeps nothing."""
    engine = KINDS[name].engine(Path(mkdtemp()), prefix_cache=False)
    return one_by_one(engine, requests(KINDS[name]))


def one_by_one(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    off = SpeculationParams(mode=SpeculationMode.OFF)
    return {r.request_id: fakes.run(engine, [replace(r, speculation=off)]).tokens[r.request_id] for r in asked}


def assert_plain(name: str, outputs: fakes.Outputs) -> None:
    """And some drafts were kept, if the head is one whose drafts ever are."""
    assert outputs.tokens == {request: plain(name)[request] for request in outputs.tokens}
    drafted, accepted = (sum(getattr(f.stats, n) for f in outputs.finished.values()) for n in ("drafted", "accepted"))
    assert drafted
    assert accepted or name not in KEPT


@pytest.mark.parametrize("name", some(KINDS, ["uno"]))
def test_any_k_in_one_batch(tmp_path: Path, name: str) -> None:
    """The second time the prompts are cached, a head does not see their features, and all have the most drafts."""
    whole = list(KINDS).index(name) % 2
    engine = KINDS[name].engine(tmp_path, max_batch_tokens=512 if whole else 17)
    assert_plain(name, fakes.run(engine, requests(KINDS[name])))
    second = fakes.run(engine, requests(KINDS[name], num_draft_tokens=8))
    assert_plain(name, second)
    assert sum(f.cached_prompt_tokens for f in second.finished.values()) > 50


WAYS = (
    ("dflash", {"kv_cache_dtype": "int8"}),
    ("uno", {"kv_cache_dtype": "int8", "attention": "rows"}),
    ("uno", {"attention": "sdpa"}),
    ("uno", {"reproducible": True}),
    ("mtp of deepseek-v3", {"kv_cache_dtype": "int8"}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), WAYS)
def test_other_ways_to_hold_a_target(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    """Which may change its tokens: so it is compared with itself."""
    kind = replace(KINDS[name], as_served=False)
    alone = one_by_one(kind.engine(tmp_path, prefix_cache=False, **options), requests(kind))
    assert fakes.run(kind.engine(tmp_path, **options), requests(kind)).tokens == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_preempted(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few steps a sequence gives up its features, K/V and states, of every drafter, and makes them again."""
    engine = KINDS[name].engine(tmp_path)
    steps, step, scheduler = count(1), engine.step, engine.scheduler

    def preempting() -> object:
        if next(steps) % 4 == 0 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[0])
        return step()

    monkeypatch.setattr(engine, "step", preempting)
    assert_plain(name, fakes.run(engine, requests(KINDS[name])))
    assert next(steps) > 9


@pytest.mark.parametrize("name", some(KINDS, ["medusa"]))
def test_greedy_under_the_rejection_rule(tmp_path: Path, name: str) -> None:
    """At temperature 0 a law is certain, so rejection too must give plain decoding's tokens."""
    asked = requests(KINDS[name], verification=Verification.REJECTION, num_draft_tokens=4)
    greedy = [r for r in asked if not r.sampling.temperature]
    assert_plain(name, fakes.run(KINDS[name].engine(tmp_path), greedy))


@pytest.mark.parametrize("name", some(["medusa", "eagle3", "dflash", "uno"], ["medusa"]))
def test_the_law_under_the_rejection_rule(tmp_path: Path, name: str) -> None:
    """1,500 seeds: the law of the last token that was drafted, over all that come before it."""
    kind = KINDS[name]
    asked = SpeculationParams(verification=Verification.REJECTION, num_draft_tokens=kind.depth)
    prompt = (kind.first, made.successor(kind.first)) if kind.first else tuple(zoo.prompts()[2])
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(kind.law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(
        kind.engine(tmp_path, max_batch_size=250, max_batch_tokens=2048, page_size=16, max_step_ms=1e9), many
    )
    rounds = [f.stats for f in outputs.finished.values()]
    for depth in range(kind.certain, kind.depth):
        kept = sum(sum(one.accepted_per_position[depth : depth + 1]) for one in rounds)
        assert 15 < kept < 0.99 * sum(one.rounds for one in rounds), "some are kept, some are not"
    want = laws.of_later(kind.reference(), prompt, kind.law, kind.depth)
    laws.assert_drawn((tokens[kind.depth] for tokens in outputs.tokens.values()), want)


def test_self_shares_the_targets_weights() -> None:
    """The truncated model holds the target's own weights, not copies."""
    target = zoo.ours(zoo.reference("llama"))
    mine = {id(p) for p in target.parameters()}
    assert {id(p) for p in first_layers(target, 1).parameters()} < mine
    assert len(list(target.parameters())) == len(mine), "the target kept all of its own"
