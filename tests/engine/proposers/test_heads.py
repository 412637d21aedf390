"""Heads: their checkpoints are loaded whole or refused with a reason, and they read the features that are true now."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv.batch import Feed
from engine.model.tap import FINAL
from engine.params import SamplingParams, SpeculationParams
from engine.proposers.base import Passed, Proposal
from engine.proposers.early_exit import first_layers
from engine.proposers.heads import proposer
from engine.proposers.heads.eagle import load_eagle
from engine.proposers.heads.features import Features
from engine.proposers.heads.medusa import load_medusa
from engine.startup.build import assemble
from engine.startup.calibrate import drafters_of
from engine.startup.warm import make_ready
from engine.types import Request, Sequence
from tests import fakes, heads, zoo

NAN = float("nan")


@lru_cache
def target() -> torch.nn.Module:
    return zoo.ours(zoo.reference("llama"))


def engine_of(**config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    return assemble(
        EngineConfig(target="llama", **{"speculation": "fixed", **config}), zoo.ours(zoo.reference("llama"))
    )


# ------------------------------------------------------------------------------------------------- what is refused


def change(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Store other tensors in a checkpoint."""
    [file] = Path(folder).glob("*.safetensors")
    save_file(tensors, file)


def test_pickles_are_refused_and_said_to_be_convertible(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickled weights, which are refused: convert"):
        load_medusa(str(tmp_path), None, target())
    with pytest.raises(ModelError, match="pickled weights"):
        load_eagle(str(tmp_path), None, target())


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no safetensors; expected config\.json"):
        load_medusa(str(tmp_path), None, target())
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"cannot load .*config\.json"):
        load_eagle(str(tmp_path), None, target())
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no object"):
        load_eagle(str(tmp_path), None, target())


def test_medusa_heads_that_do_not_fit(tmp_path: Path) -> None:
    folder, tensors = heads.medusa(tmp_path), heads.medusa_tensors()
    change(folder, {k: t for k, t in tensors.items() if k != "2.0.linear.bias"})
    with pytest.raises(ModelError, match=r"does not fit the target: 2\.0\.linear\.bias is missing"):
        load_medusa(folder, None, target())
    change(folder, tensors | {"4.0.linear.bias": torch.zeros(heads.HIDDEN)})
    with pytest.raises(ModelError, match=r"4\.0\.linear\.bias is not known"):
        load_medusa(folder, None, target())
    change(folder, tensors | {"1.1.weight": torch.zeros(50, heads.HIDDEN)})
    with pytest.raises(ModelError, match=r"1\.1\.weight is \(50, 32\), expected \(97, 32\)"):
        load_medusa(folder, None, target())
    (Path(folder) / "config.json").write_text(json.dumps({"medusa_num_heads": 4}))
    with pytest.raises(ModelError, match="medusa_num_layers None; expected a positive number"):
        load_medusa(folder, None, target())


def test_eagle_heads_that_do_not_fit(tmp_path: Path) -> None:
    folder, tensors = heads.eagle(tmp_path), heads.eagle_tensors()
    change(folder, {k: t for k, t in tensors.items() if k != "fc.weight"})
    with pytest.raises(ModelError, match=r"fc\.weight is missing"):
        load_eagle(folder, None, target())
    change(folder, tensors | {"fc.weight": torch.zeros(heads.HIDDEN, heads.HIDDEN)})
    with pytest.raises(ModelError, match=r"fc\.weight is \(32, 32\), expected \(32, 64\)"):
        load_eagle(folder, None, target())
    change(folder, tensors | {"d2t": torch.zeros(9)})
    with pytest.raises(ModelError, match="reads layers 2, 1 and -1 of the target, which has 2"):
        load_eagle(folder, None, target())  # it is taken for one of EAGLE-3
    change(folder, tensors)
    (Path(folder) / "config.json").write_text(json.dumps(heads.EAGLE_CONFIG | {"hidden_size": 64}))
    with pytest.raises(ModelError, match="a head for 64 features and 97 tokens; the target has"):
        load_eagle(folder, None, target())
    (Path(folder) / "config.json").write_text(json.dumps(heads.EAGLE_CONFIG | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="has 2 layers"):
        load_eagle(folder, None, target())


def test_as_many_layers_as_there_are_is_no_draft() -> None:
    with pytest.raises(ModelError, match="expected 1 to 1"):
        first_layers(target(), 2)


def test_names_follow_what_is_loaded(tmp_path: Path) -> None:
    assert engine_of().proposer_names == ("none", "ngram", "suffix")
    assert engine_of(proposer="self").proposer_names == ("none", "ngram", "suffix", "self", "auto")
    both = engine_of(medusa=heads.medusa(tmp_path), eagle=heads.eagle(tmp_path))
    assert both.proposer_names == ("none", "ngram", "suffix", "medusa", "eagle", "auto")
    assert both.default_proposer == "auto"
    with pytest.raises(ModelError, match="proposer is 'medusa'; with what is loaded there is none, ngram, suffix"):
        engine_of(proposer="medusa")


def test_arenas_of_all_drafters_share_the_memory(tmp_path: Path) -> None:
    plain = engine_of(kv_memory=0.0001, page_size=8, attention="reference")
    more = engine_of(kv_memory=0.0001, page_size=8, attention="reference", self_layers=1, eagle=heads.eagle(tmp_path))
    assert more.total_pages == plain.total_pages // 2, "one layer for self and one for eagle, beside the target's two"


# --------------------------------------------------------------------------------------------- features, by position


def test_features_join_or_start_again() -> None:
    def rows(*values: float) -> torch.Tensor:
        return torch.tensor(values)[:, None]

    features = Features()
    assert features.take(0, rows(0, 1, 2))
    assert features.take(2, rows(20, 3)), "in place of a draft's row"
    assert [row.item() for row in features.rows] == [0, 1, 20, 3]
    features.drop(2)
    features.cut(3)
    assert (features.first, [row.item() for row in features.rows]) == (2, [20])
    assert not features.take(9, rows(9)), "a gap"
    assert (features.first, features.stop) == (9, 10)
    assert not features.take(4, rows(4)), "fed again from before what is known"
    assert (features.first, features.stop) == (4, 5)


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


class Checked:
    """A proposer whose every draft is compared with a recomputation, after all that must not matter was poisoned."""

    def __init__(self, proposer: object, expected: object) -> None:
        self.inner, self.expected, self.count = proposer, expected, 0
        self.uses_draft_kv, self.shares_draft_kv = proposer.uses_draft_kv, proposer.shares_draft_kv

    def observe(self, passed: list[Passed]) -> None:
        self.inner.observe(passed)

    def propose(self, sequences: list[Sequence], k_each: list[int]) -> Proposal:
        for sequence in sequences:
            self.poison(sequence)
        proposal = self.inner.propose(sequences, k_each)
        for sequence, k, drafts in zip(sequences, k_each, proposal.tokens, strict=True):
            assert not drafts or list(drafts) == self.expected(sequence.tokens, k)
            self.count += len(drafts)
        return proposal

    @torch.inference_mode()
    def poison(self, sequence: Sequence) -> None:
        """Features of drafts that were not kept, and K/V beyond the cursor."""
        kept = self.inner._unfed if self.uses_draft_kv else self.inner._features
        features = kept.get(sequence, Features())  # none before the first pass over a prompt of one token
        for i in range(max(0, len(sequence.tokens) - 1 - features.first), len(features.rows)):
            features.rows[i] = torch.full_like(features.rows[i], NAN)
        if self.uses_draft_kv:
            arena, page = self.inner._head.arena, sequence.draft.page_table[0]
            stale = slice(page * arena.page_size + sequence.draft.kv_len, (page + 1) * arena.page_size)
            arena.k[0][stale], arena.v[0][stale] = NAN, NAN


@pytest.mark.parametrize("max_batch_tokens", [512, 11], ids=["whole", "chunked"])
@pytest.mark.parametrize(("name", "expected"), [("medusa", medusa_drafts), ("eagle", eagle_drafts)])
def test_drafts_come_from_true_features(tmp_path: Path, name: str, expected: object, max_batch_tokens: int) -> None:
    engine = engine_of(
        max_batch_size=5, max_batch_tokens=max_batch_tokens, **{name: getattr(heads, name)(tmp_path)}, proposer=name
    )
    by_name = engine._proposers._by_name
    checked = by_name[name] = Checked(by_name[name], expected)
    requests = [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt[: 1 + i * 9]),
            sampling=SamplingParams(max_tokens=20),
            speculation=SpeculationParams(num_draft_tokens=k, proposer=None if i < 5 else "none"),
        )
        for i, (prompt, k) in enumerate(zip(zoo.prompts(6), (4, 1, 2, 3, 4, 4), strict=True))
    ]
    fakes.run(engine, requests)
    assert checked.count > 30


def test_a_head_that_was_long_not_asked_catches_up(tmp_path: Path) -> None:
    """K changes from step to step; what was not fed waits, and nothing else is kept."""
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="eagle")
    by_name = engine._proposers._by_name
    eagle, checked = by_name["eagle"], Checked(by_name["eagle"], eagle_drafts)
    by_name["eagle"] = checked
    engine.add(Request(request_id="r", token_ids=(5, 6, 7, 8), sampling=SamplingParams(max_tokens=40)))
    engine.step()
    [sequence] = engine._scheduler.running
    waiting = []
    for step in range(8):
        engine._scheduler._most_drafts = lambda _, k=(0, 0, 3)[step % 3]: k
        engine.step()
        waiting.append(len(eagle._unfed[sequence].rows))
        assert waiting[-1] <= len(sequence.tokens) + 3
    assert checked.count
    assert waiting[0] > 4, "the prompt and more"
    assert waiting[2] <= 4, "no more than the last pass"


def test_a_prompt_whose_start_was_never_seen(tmp_path: Path) -> None:
    """A sequence that starts behind a cached prefix: the head attends to what it has, from the first known position."""
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="eagle")
    eagle, tokens = engine._proposers._by_name["eagle"], list(range(3, 15))
    request = Request(request_id="r", token_ids=tuple(tokens), sampling=SamplingParams())
    [sequence] = engine._intake.open(request)
    sequence.draft.page_table.append(0)
    eagle._tap.keep(FINAL, true_features(tokens)[5 : len(tokens) - 1])
    eagle.observe([Passed(sequence, Feed(tokens[5:-1], 5, [0]), 0)])
    [drafts] = eagle.propose([sequence], [3]).tokens
    assert list(drafts) == eagle_drafts(tokens, 3, first=5)
    assert sequence.draft.kv_len == len(tokens) - 1 - 5
    eagle._tap.keep(FINAL, true_features(tokens)[8:9])
    eagle.observe([Passed(sequence, Feed(tokens[8:9], 8, [0]), 0)])
    assert eagle.propose([sequence], [3]).tokens == ((),), "what it was shown does not reach the end: no drafts"


def test_of_features_that_wait_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is not asked must not hold all of a long text; when it is, it begins with what is there."""
    monkeypatch.setattr(proposer, "MOST_UNFED", 4)
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="eagle")
    eagle, tokens = engine._proposers._by_name["eagle"], list(range(3, 15))
    [sequence] = engine._intake.open(Request(request_id="r", token_ids=tuple(tokens), sampling=SamplingParams()))
    sequence.draft.page_table.append(0)
    waiting = []
    for position in range(len(tokens) - 1):
        eagle._tap.keep(FINAL, true_features(tokens)[position : position + 1])
        eagle.observe([Passed(sequence, Feed(tokens[position : position + 1], position, [0]), 0)])
        waiting.append(len(eagle._unfed[sequence].rows))
    assert waiting == [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6]
    project, projected = eagle._head.project, list[int]()
    eagle._head.project = lambda rows: projected.append(len(rows)) or project(rows)
    assert list(eagle.propose([sequence], [3]).tokens[0]) == eagle_drafts(tokens, 3, first=5)
    assert projected == [6], "what is fed, and that once"


def test_a_head_that_cannot_read_costs_its_drafts_alone(tmp_path: Path) -> None:
    """`observe` fails three times: then the head is not asked again, and the tokens are those of plain decoding."""
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="eagle")
    request = Request(request_id="r", token_ids=(5, 6, 7, 8), sampling=SamplingParams(max_tokens=20))
    want = fakes.run(engine_of(proposer="none"), [request]).tokens

    def broken(_passed: object) -> None:
        raise RuntimeError("no features today")

    engine._proposers._by_name["eagle"].observe = broken
    assert fakes.run(engine, [request], failures=3).tokens == want


def test_a_candidate_that_fails_leaves_the_drafting_to_the_others(tmp_path: Path) -> None:
    """After three failures the head has drafted nothing, and the lookup drafts for the sequences of `auto`."""
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="auto", num_draft_tokens=4)
    text = (5, 6, 7, 8, 9, 10) * 8
    request = Request(request_id="r", token_ids=text, sampling=SamplingParams(max_tokens=60, logit_bias={5: 60.0}))

    def broken(*_: object) -> None:
        raise RuntimeError("no drafts today")

    engine._proposers._by_name["eagle"].propose = broken
    done = fakes.run(engine, [request], failures=3)
    assert done.tokens["r"] == [5] * 60
    assert done.finished["r"].stats.accepted > 20


def test_before_a_request_comes_each_candidate_has_drafted_and_nothing_is_learned(tmp_path: Path) -> None:
    """A first pass takes longer than any other: a request must not wait for it, nor a cost be learned from it."""
    engine = engine_of(eagle=heads.eagle(tmp_path), proposer="auto", num_draft_tokens=4)
    asked = Counter[str]()
    for name in drafters_of(engine):
        candidate = engine._proposers._by_name[name]
        candidate.propose = partial(counted, asked, name, candidate.propose)
    make_ready(engine)
    assert set(asked) == {"eagle", "suffix"}
    assert engine.control.target.count == 0
    assert not engine.has_work


def counted(calls: Counter[str], name: str, call: Callable[..., Proposal], *given: object) -> Proposal:
    calls[name] += 1
    return call(*given)


def test_a_lookup_that_fails_costs_its_drafts_alone() -> None:
    engine = engine_of(proposer="suffix", num_draft_tokens=4)
    request = Request(request_id="r", token_ids=(5, 6, 7, 8) * 8, sampling=SamplingParams(max_tokens=30))
    want = fakes.run(engine_of(proposer="none"), [request]).tokens

    def broken(*_: object) -> None:
        raise RuntimeError("nothing is found today")

    engine._proposers._by_name["suffix"].guess = broken
    assert fakes.run(engine, [request], failures=3).tokens == want
