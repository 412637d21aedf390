"""Heads: what is loaded can be named, they read the features that are true now, and what fails costs drafts alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.proposers.base import Lookup
from pilotfish.engine.proposers.heads import proposer
from pilotfish.engine.proposers.model import first_layers
from pilotfish.engine.proposers.sources import check_proposer
from pilotfish.engine.startup.calibrate import drafters_of
from pilotfish.engine.startup.warm import make_ready
from tests import fakes, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints, test_dflash
from tests.scripted import drafts_from


def engine_of(wrappers: Mapping[str, Callable[..., Any]] = MappingProxyType({}), **config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    settings = EngineConfig(target="llama", **{"speculation": "fixed", **config})
    return heads.assembled(settings, zoo.ours(zoo.reference("llama")), wrappers=wrappers)


# ------------------------------------------------------------------------------------------------- what is loaded


def test_as_many_layers_as_there_are_is_no_draft() -> None:
    with pytest.raises(ModelError, match="expected 1 to 1"):
        first_layers(zoo.ours(zoo.reference("llama")), 2)


def test_names_follow_what_is_loaded(tmp_path: Path) -> None:
    assert engine_of().facts.proposer_names == ("none", "ngram", "suffix")
    assert engine_of(draft="self").facts.proposer_names == ("none", "ngram", "suffix", "self", "auto")
    both = engine_of(draft=[heads.medusa(tmp_path), heads.eagle(tmp_path)])
    assert both.facts.proposer_names == ("none", "ngram", "suffix", "medusa", "eagle", "auto")
    assert both.facts.default_proposer == "auto"
    with pytest.raises(ModelError, match="proposer is 'medusa'; available: none, ngram, suffix"):
        check_proposer(EngineConfig(target="t", proposer="medusa"), {})


def test_arenas_of_all_drafters_share_the_memory(tmp_path: Path) -> None:
    plain = engine_of(kv_memory=0.0001, page_size=8, attention="reference")
    more = engine_of(kv_memory=0.0001, page_size=8, attention="reference", draft=["self:1", heads.eagle(tmp_path)])
    assert more.facts.total_pages == plain.facts.total_pages // 2, (
        "one layer for self and one for eagle, beside the target's two"
    )


# ------------------------------------------------------------------------------- drafts, against a full recomputation


@torch.no_grad()
def true_features(tokens: list[int]) -> torch.Tensor:
    """Of every position, by the plain transformers model."""
    return zoo.reference("llama").model(torch.tensor([tokens])).last_hidden_state[0]


@torch.no_grad()
def medusa_drafts(tokens: list[int], k: int) -> list[int]:
    tensors, h = heads.medusa_tensors(), true_features(tokens)[len(tokens) - 2]
    made = []
    for i in range(min(k, 4)):
        x = h + torch.nn.functional.silu(tensors[f"{i}.0.linear.weight"] @ h + tensors[f"{i}.0.linear.bias"])
        made.append(int((tensors[f"{i}.1.weight"] @ x).argmax()))
    return made


@lru_cache
def eagle_layer() -> tuple[LlamaDecoderLayer, LlamaRotaryEmbedding]:
    config = LlamaConfig(**{k: v for k, v in heads.EAGLE_CONFIG.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    mark = "layers.0."
    layer.load_state_dict({k.removeprefix(mark): t for k, t in heads.eagle_tensors().items() if k.startswith(mark)})
    return layer, LlamaRotaryEmbedding(config)


@torch.no_grad()
def eagle_drafts(tokens: list[int], k: int, first: int = 0) -> list[int]:
    """From scratch: every true feature from `first` on, then the head's own."""
    model, (layer, rotary) = zoo.reference("llama"), eagle_layer()
    features, following, made = true_features(tokens)[first : len(tokens) - 1], tokens[first + 1 :], []
    for _ in range(k):
        embedded = model.model.embed_tokens(torch.tensor(following))
        x = (torch.cat([embedded, features], -1) @ heads.eagle_tensors()["fc.weight"].T)[None]
        positions = torch.arange(len(following))[None]
        out = layer(x, position_ids=positions, position_embeddings=rotary(x, positions))[0]
        features = torch.cat([features, out[-1:]])
        made.append(int(model.lm_head(out[-1]).argmax()))
        following = [*following, made[-1]]
    return made


@pytest.mark.parametrize(
    ("name", "expected", "max_batch_tokens"), [("medusa", medusa_drafts, 11), ("eagle", eagle_drafts, 512)]
)
def test_drafts_come_from_true_features(
    tmp_path: Path, name: str, expected: heads.Expected, max_batch_tokens: int
) -> None:
    model = zoo.ours(zoo.reference("llama"))
    heads.decode(name, getattr(heads, name)(tmp_path), model, expected, max_batch_tokens=max_batch_tokens)


def test_a_head_that_was_long_not_asked_catches_up(tmp_path: Path) -> None:
    """K changes from step to step; what was not fed waits, and nothing else is kept."""
    checked = list[heads.Checked]()
    wrap = {"eagle": lambda inner: checked.append(heads.Checked(inner, eagle_drafts)) or checked[0]}
    engine = engine_of(wrap, draft=heads.eagle(tmp_path), proposer="eagle")
    engine.add(fakes.request((5, 6, 7, 8), max_tokens=40))
    engine.step()
    [sequence], waiting = engine.scheduler.running, []
    for step in range(8):
        engine.scheduler.control.choose = lambda _sequences, _limits, *_, k=(0, 0, 3)[step % 3]: [k]
        engine.step()
        waiting.append(len(checked[0].inner.unfed[sequence].rows))
        assert waiting[-1] <= len(sequence.tokens) + 3
    assert sum(checked[0].counts)
    assert waiting[0] > 4, "the prompt and more"
    assert waiting[2] <= 4, "no more than the last pass"


TOKENS = list(range(3, 15))


@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_a_prompt_whose_start_was_never_seen(tmp_path: Path, name: str) -> None:
    """A sequence that starts behind a cached prefix: the head attends to what it has, at its true distances."""
    if name == "eagle":
        engine = engine_of(draft=heads.eagle(tmp_path), proposer="eagle")
        states, want = {FINAL: true_features(TOKENS)}, eagle_drafts(TOKENS, 3, first=5)
    else:
        engine = test_dflash.engine_of(dflash_checkpoints.authors(tmp_path))
        states = dict(zip((1, 3), test_dflash.features(TOKENS).chunk(2, -1), strict=True))
        want = test_dflash.drafts_of(TOKENS, 3, dflash_checkpoints.tensors(), first=5)
    head, sequence = engine.proposers.by_name[name], heads.opened(TOKENS)
    heads.show(head, sequence, states, 5, len(TOKENS) - 1)
    assert drafts_from(head, [sequence], [3]) == (tuple(want),)
    assert sequence.draft.kv_len == len(TOKENS) - 1 - 5
    heads.show(head, sequence, states, 8, 9)
    assert drafts_from(head, [sequence], [3]) == ((),), "what it was shown does not reach the end: no drafts"


def test_of_features_that_wait_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is not asked must not hold all of a long text; when it is, it begins with what is there."""
    monkeypatch.setattr(proposer, "MOST_UNFED", 4)
    engine, sequence = engine_of(draft=heads.eagle(tmp_path), proposer="eagle"), heads.opened(TOKENS)
    eagle, states, waiting = engine.proposers.by_name["eagle"], {FINAL: true_features(TOKENS)}, []
    for position in range(len(TOKENS) - 1):
        heads.show(eagle, sequence, states, position, position + 1)
        waiting.append(len(eagle.unfed[sequence].rows))
    assert waiting == [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6]
    project, projected = eagle.head.project, list[int]()
    eagle.head.project = lambda rows: projected.append(len(rows)) or project(rows)
    assert list(drafts_from(eagle, [sequence], [3])[0]) == eagle_drafts(TOKENS, 3, first=5)
    assert projected == [6], "what is fed, and that once"


def broken(*_: object) -> None:
    raise RuntimeError("nothing today")


@pytest.mark.parametrize(("name", "fault"), [("eagle", "observe"), ("eagle", "propose"), ("suffix", "look_up")])
def test_what_fails_costs_its_drafts_alone(tmp_path: Path, name: str, fault: str) -> None:
    """Whether a head cannot read, or draft, or a lookup cannot find: after three times it is not asked again."""
    engine = engine_of(draft=heads.eagle(tmp_path), proposer=name, num_draft_tokens=4)
    asked = [fakes.request((5, 6, 7, 8) * 8, max_tokens=30)]
    want = fakes.run(engine_of(proposer="none"), asked).tokens
    setattr(engine.proposers.by_name[name], fault, broken)
    assert fakes.run(engine, asked, failures=3).tokens == want


def test_a_candidate_that_fails_leaves_the_drafting_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three failures the head has drafted nothing, and the lookup drafts for the sequences of `auto`."""
    engine = engine_of(draft=heads.eagle(tmp_path), proposer="auto", num_draft_tokens=4)
    monkeypatch.setattr(engine, "_clock", count().__next__)  # measured times would decide how often the head is asked
    text = (5, 6, 7, 8, 9, 10) * 8
    engine.proposers.by_name["eagle"].propose = broken
    done = fakes.run(engine, [fakes.request(text, max_tokens=60, logit_bias={5: 60.0})], failures=3)
    assert done.tokens["r"] == [5] * 60
    assert done.finished["r"].stats.accepted > 20


def test_before_a_request_comes_each_candidate_has_drafted_and_nothing_is_learned(tmp_path: Path) -> None:
    """A first pass takes longer than any other: a request must not wait for it, nor a cost be learned from it."""
    engine = engine_of(draft=heads.eagle(tmp_path), proposer="auto", num_draft_tokens=4)
    asked = set[str]()
    for name in drafters_of(engine):
        own = engine.proposers.by_name[name]
        method = "look_up" if isinstance(own, Lookup) else "propose"
        drafts = getattr(own, method)
        setattr(own, method, lambda *given, n=name, d=drafts: asked.add(n) or d(*given))
    make_ready(engine)
    assert asked == {"eagle", "suffix"}
    assert engine.control.times.target.count == 0
    assert not engine.has_work
