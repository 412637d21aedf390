"""With drafts of any head the tokens are those of plain decoding: any K, any law, in chunks, cached and preempted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import SamplingParams, SpeculationMode, SpeculationParams, Verification
from engine.startup.build import assemble
from engine.types import Request
from tests import fakes, heads, laws, zoo
from tests.covering import covering, some
from tests.engine.proposers.heads import dflash_checkpoints as made

IN_C = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
PAGES = 20  # for a few of ten sequences
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
    has_draft_model: bool = False

    def target(self) -> PreTrainedModel:
        """A fresh one: some heads read its features by a hook that stays."""
        mine = zoo.ours(self.reference())
        return zoo.as_served(mine) if self.as_served else mine

    def engine(self, folder: Path, **config: object) -> Engine:
        draft = zoo.near(self.reference()) if self.has_draft_model else None
        usual = {"max_batch_size": 16, "proposer": self.proposer, "speculation": "fixed", "page_size": 8}
        names = {"target": "t", "draft": "near" if draft else None}
        return assemble(EngineConfig(**names, **self.parts(folder), **usual | config), self.target(), draft)


def _everyone(folder: Path) -> dict[str, object]:
    return {"self_layers": 1, "medusa": heads.medusa(folder), "eagle": heads.eagle(folder)}


@cache
def _layers(number: int, **sizes: int) -> PreTrainedModel:
    return zoo.with_large_weights(LlamaConfig(**zoo.COMMON | {"num_hidden_layers": number} | sizes))


def _eagle3(**changes: object) -> Callable[[Path], dict[str, object]]:
    width = int(str(changes.get("hidden_size", 32)))
    return lambda folder: {"eagle": heads.eagle3(folder, changes, target=width)}


@cache
def _planted() -> PreTrainedModel:
    """Flat enough that sampled tokens often differ from the likeliest, so drafts are kept and are not."""
    return made.planted_target(sharpness=2.0)


def _dflash(folder: Path) -> dict[str, object]:
    config = made.AUTHORS | {"final_logit_softcapping": 30.0}
    return {"dflash": heads.save(folder, config, made.tensors())}


LLAMA = {"reference": lambda: zoo.reference("llama"), "parts": _everyone, "has_draft_model": True}
KINDS = {
    **{name: Kind(name, **LLAMA) for name in ("suffix", "self", "medusa", "eagle", "auto")},
    "eagle3": Kind(
        "eagle", lambda: _layers(6), _eagle3(draft_vocab_size=60, norm_output=True, fc_norm=True)
    ),
    "eagle3 in C": Kind(
        "eagle", lambda: _layers(6, **IN_C), _eagle3(draft_vocab_size=80, **IN_C), as_served=True
    ),
    "dflash": Kind(
        "dflash", _planted, lambda folder: {"dflash": made.planted(folder)}, first=made.FIRST, heat=3.5,
        law=SamplingParams(temperature=4.0, top_k=6, max_tokens=4, ignore_eos=True), depth=2,
    ),
    "dflash of llama": Kind("dflash", lambda: _layers(4), _dflash),
    "dflash of lfm-2": Kind("dflash", lambda: zoo.reference("lfm-2"), _dflash),
}  # fmt: skip
OF_HEADS = ("medusa", "eagle", "eagle3", "dflash")  # whose drafts are kept now and then


def laws_of(kind: Kind) -> tuple[SamplingParams, ...]:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    return tuple(
        SamplingParams(max_tokens=24, **law)
        for law in (
            {},
            {"temperature": 0.8 * kind.heat, "top_p": 0.9, "seed": 11},
            {"temperature": 1.3 * kind.heat, "seed": 0},
            {"temperature": 0.9 * kind.heat, "seed": 5, "min_tokens": 20, **penalties},
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
            speculation=SpeculationParams(**{"num_draft_tokens": i % 9} | speculation),
        )
        for i, prompt in enumerate(prompts)
    ]


@cache
def plain(name: str) -> dict[str, list[int]]:
    """Each request by itself, one token at a time."""
    engine = assemble(EngineConfig(target="t", proposer="none"), KINDS[name].target())
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in requests(KINDS[name])}


def assert_plain(name: str, outputs: fakes.Outputs) -> None:
    """And some drafts were kept, if the head is one whose drafts ever are."""
    assert outputs.tokens == {request: plain(name)[request] for request in outputs.tokens}
    drafted, accepted = (sum(getattr(f.stats, n) for f in outputs.finished.values()) for n in ("drafted", "accepted"))
    assert drafted
    assert accepted or name not in ("eagle", "dflash")


@pytest.mark.parametrize(("name", "max_batch_tokens"), covering(KINDS, [512, 17], every=10, first=3))
def test_any_k_in_one_batch(tmp_path: Path, name: str, max_batch_tokens: int) -> None:
    """The second time the prompts are cached, and a head does not see their features; then the most drafts for all."""
    engine = KINDS[name].engine(tmp_path, max_batch_tokens=max_batch_tokens)
    first, second = (fakes.run(engine, requests(KINDS[name])) for _ in range(2))
    assert_plain(name, first)
    assert_plain(name, second)
    assert sum(f.cached_prompt_tokens for f in second.finished.values()) > 50
    assert_plain(name, fakes.run(engine, requests(KINDS[name], num_draft_tokens=8)))


@pytest.mark.slow
def test_as_many_drafts_as_pay(tmp_path: Path) -> None:
    asked = requests(KINDS["dflash"], mode=SpeculationMode.AUTO, num_draft_tokens=8)
    assert fakes.run(KINDS["dflash"].engine(tmp_path, speculation="auto"), asked).tokens == plain("dflash")


@pytest.mark.slow
def test_rounded_keys_and_values_of_the_draft(tmp_path: Path) -> None:
    """The option rounds those of the target, too: so it is compared with itself."""
    kind = KINDS["dflash"]
    drafted, alone = (
        fakes.run(kind.engine(tmp_path, kv_cache_dtype="int8", proposer=p), requests(kind)).tokens
        for p in ("dflash", "none")
    )
    assert drafted == alone


@pytest.mark.parametrize("name", some(KINDS, ["eagle3"]))
def test_preempted(tmp_path: Path, name: str) -> None:
    """Features and K/V of every drafter are given up and made again."""
    kind, little = KINDS[name], 0.0005  # GiB
    per_page = little / kind.engine(tmp_path, kv_memory=little, attention="reference").total_pages
    engine = kind.engine(tmp_path, kv_memory=(PAGES + 0.5) * per_page, attention="reference")
    assert PAGES - 4 < engine.total_pages <= PAGES, "of layers that keep states these take some of the memory"
    outputs = fakes.run(engine, requests(kind))
    assert outputs.preempted
    assert_plain(name, outputs)


@pytest.mark.parametrize("name", some(KINDS, ["medusa", "eagle3"]))
def test_greedy_under_the_rejection_rule(tmp_path: Path, name: str) -> None:
    """At temperature 0 a law is certain, so rejection too must give plain decoding's tokens."""
    asked = requests(KINDS[name], verification=Verification.REJECTION, num_draft_tokens=4)
    greedy = [r for r in asked if not r.sampling.temperature]
    assert_plain(name, fakes.run(KINDS[name].engine(tmp_path), greedy))


@pytest.mark.parametrize("name", some(["self", *OF_HEADS], ["medusa"]))
def test_the_law_under_the_rejection_rule(tmp_path: Path, name: str) -> None:
    """1,500 seeds: the law of the last token that was drafted, over all that come before it."""
    kind = KINDS[name]
    asked = SpeculationParams(verification=Verification.REJECTION, num_draft_tokens=kind.depth)
    prompt = (kind.first, made.successor(kind.first)) if kind.first else tuple(zoo.prompts()[2])
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(kind.law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(kind.engine(tmp_path, max_batch_size=64, page_size=128), many)
    rounds = [f.stats for f in outputs.finished.values()]
    for depth in range(kind.depth):
        kept = sum(one.accepted_per_position[depth] for one in rounds)
        assert 15 < kept < 0.99 * sum(one.rounds for one in rounds), "some are kept, some are not"
    want = laws.of_later(kind.reference(), prompt, kind.law, kind.depth)
    laws.assert_drawn((tokens[kind.depth] for tokens in outputs.tokens.values()), want)
