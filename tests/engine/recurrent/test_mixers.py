"""Models with states over ragged batches: in chunks, in company, with drafts that are taken back, as their own pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from engine.attention import choose, reference
from engine.attention.registry import Attend, Ragged
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.kv.states import StatePool
from engine.model.linear.packed import PackedLinear, is_batch_invariant, pack
from engine.model.runner import layout_of_model
from engine.native import library
from engine.recurrent.arena import StateArena, StateLayout
from engine.recurrent.mixers import prepare
from engine.types import KVCursor
from tests.classes import KINDS, tiny
from tests.zoo import VOCAB, as_served, family_config, ours, with_large_weights
from tests.zoo import reference as plain

PAGE, LOG, DEVICE = 8, 3, torch.device("cpu")
# Every kind of recurrence, alone and beside attention. Older versions of transformers have not all of them.
NAMES = [name for name in (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3", "mamba",
    "falcon_mamba", "mamba2", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "falcon_h1-normed",
    "zamba", "zamba2", "kimi_linear", "bailing_hybrid",
) if name.partition("-")[0] in KINDS]  # fmt: skip
# One of each recurrence whose matrices our C multiplies.
PACKED = ("qwen3_next", "olmo_hybrid", "lfm2", "mamba", "falcon_mamba", "mamba2", "jamba", "nemotron_h",
          "falcon_h1-normed", "kimi_linear", "bailing_hybrid")  # fmt: skip

# Widths that our C multiplies, and what a family has in two ways.
_CHANGED = {"mamba": {"time_step_rank": 16}, "falcon_mamba": {"time_step_rank": 16}, "jamba": {"mamba_dt_rank": 16}}
_CHANGED |= {"kimi_linear": {"linear_head_dim": 16}, "falcon_h1-normed": {"mamba_rms_norm": True}}


def hybrid(name: str) -> PreTrainedConfig:
    """The config of a tiny model."""
    if name == "lfm2":
        return family_config("lfm-2")
    config = tiny(name.partition("-")[0])
    for field, value in _CHANGED.get(name, {}).items():
        setattr(config, field, value)
    return config


class Served:
    """A model with its arenas, and cursors of two sequences."""

    def __init__(self, model: PreTrainedModel, attend: Attend = reference.attend) -> None:
        layout = StateLayout.of(model)
        assert layout is not None, "the model keeps no state"
        self.model, self.layout, self.arena = model, layout, KVArena(layout_of_model(model), 8, PAGE, DEVICE)
        self.attend = attend
        pool = StatePool(num_slots=5, log_rows=LOG, snapshots=False)
        self.states, self.cursors = StateArena(layout, 5, LOG, DEVICE), [KVCursor(), KVCursor()]
        assert all(pool.open(cursor) for cursor in self.cursors)

    @torch.inference_mode()
    def run(self, *feeds: tuple[int, Seq[int], int]) -> list[Tensor]:
        """Feed (sequence, tokens, drafts among them) in one pass; logits of each sequence."""
        batch = RaggedBatch.of([self._feed(*feed) for feed in feeds], PAGE, DEVICE)
        out = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=torch.arange(sum(len(tokens) for _, tokens, _ in feeds)),
            ragged=Ragged(batch, self.arena, self.attend, self.states.during(batch)),
            **self.states.keywords(batch),
        )
        for who, tokens, _ in feeds:
            self.cursors[who].advance(self.cursors[who].kv_len + len(tokens))
        return list(out.logits[0].split([len(tokens) for _, tokens, _ in feeds]))

    def _feed(self, who: int, tokens: Seq[int], num_draft: int) -> Feed:
        cursor, start = self.cursors[who], self.cursors[who].kv_len
        stop = start + len(tokens)
        span = cursor.span(start, stop, known=stop - num_draft)
        return Feed(tokens, start, range(4 * who, 4 * who + 4), len(tokens), state=span)


def verify_in_turns(served: Served, texts: list[list[int]]) -> list[Tensor]:
    """Logits of both texts: a chunk of the first alone, then both together, with one right draft and one wrong."""
    rows: list[list[Tensor]] = [served.run((0, texts[0][:5], 0)), []]
    while served.cursors[0].kv_len + 3 < len(texts[0]):
        feeds = []
        for who, (text, cursor) in enumerate(zip(texts, served.cursors, strict=True)):
            newest, right, other = text[cursor.kv_len :][:3]
            feeds.append((who, [newest, right, (other + 1) % VOCAB], 2))
        for who, logits in enumerate(served.run(*feeds)):
            rows[who].append(logits[:2])
            served.cursors[who].rollback(served.cursors[who].kv_len)
    return [torch.cat(logits) for logits in rows]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_drafts_in_company_are_as_the_whole_text(name: str) -> None:
    model = with_large_weights(hybrid(name))
    texts = torch.randint(3, VOCAB, (2, 16)).tolist()
    got = verify_in_turns(Served(ours(model)), texts)
    for text, rows in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text]), use_cache=False).logits[0, : len(rows)]
        assert len(rows) >= 8
        torch.testing.assert_close(rows, want, rtol=0, atol=float(2e-4 * want.std()))


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("name", [name for name in PACKED if name in NAMES])
def test_a_packed_row_has_the_same_bits_in_any_pass(name: str) -> None:
    served = as_served(ours(with_large_weights(hybrid(name))))
    assert is_batch_invariant(served)
    runs, text = Served(served, choose("auto", DEVICE, row_wise=True)), torch.randint(3, VOCAB, (19,)).tolist()
    (whole,) = runs.run((0, text, 0))
    parts = runs.run((1, text[:2], 0))
    parts += runs.run((1, text[2:10], 3))
    runs.cursors[1].rollback(9)  # of three drafts one is kept
    parts[-1] = parts[-1][:6]
    parts += runs.run((1, [text[8]], 0))
    parts += runs.run((1, text[9:], 0))
    assert torch.equal(torch.cat(parts), whole)


def test_a_prepared_model_does_without_our_cache_what_it_did() -> None:
    model = with_large_weights(hybrid("qwen3_next"))
    prompt = torch.randint(3, VOCAB, (1, 7))
    before = model.generate(prompt, max_new_tokens=9, do_sample=False)
    assert prepare(model)
    assert prepare(model), "the second time it has mixers as well"
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), before)


def test_a_copy_of_the_first_layers_has_states_of_its_own() -> None:
    whole = ours(with_large_weights(hybrid("mamba2")))
    first = Served(whole)
    part = copy.deepcopy(whole)
    part.backbone.layers = part.backbone.layers[:1]
    for parameter in part.parameters():
        parameter.data.mul_(2)
    second = Served(part)
    assert len(second.layout.parts) < len(first.layout.parts)
    tokens = [5, 6, 7, 8, 9]
    (want,) = first.run((0, tokens, 0))
    second.run((0, tokens, 0))
    first.cursors[0].kv_len = 0
    first.cursors[0].reset_states()
    assert torch.equal(first.run((0, tokens, 0))[0], want)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("pack_first", [True, False])
def test_a_projection_whose_weight_is_read_may_become_our_matmul(pack_first: bool) -> None:
    model = with_large_weights(hybrid("mamba"))
    served = ours(model)
    if not pack_first:
        prepare(served)
    pack(served)
    runs = Served(served)
    assert isinstance(served.backbone.layers[0].mixer.dt_proj.inner, PackedLinear)
    tokens = [5, 6, 7, 8, 9]
    (got,) = runs.run((0, tokens, 0))
    with torch.inference_mode():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(got, want, rtol=0, atol=float(1e-4 * want.std()))


def test_layers_that_do_not_attend_have_no_keys_and_values_and_slots_take_what_the_layout_says() -> None:
    layout, convolving = (StateLayout.of(ours(with_large_weights(hybrid(name)))) for name in ("nemotron_h", "lfm2"))
    assert set(layout.attends) == {2}
    assert len(layout.parts) == 2, "a convolution and a recurrence"
    channels, convolutions, kept = 32, 2, 2
    assert convolving.bytes_per_slot(LOG) == convolutions * channels * 4 * (kept + LOG)
    assert StateLayout.of(ours(plain("llama"))) is None


def test_a_layer_with_an_index_of_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot run with its states in slots"):
        StateLayout.of(ours(with_large_weights(tiny("qwen4_exp_text"))))


class Averages(nn.Module):
    """A mixer that keeps a state of its own beside its convolution."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **others: object) -> Tensor:
        out: Tensor = self.inner(hidden_states, **others)
        cache = next((value for value in others.values() if isinstance(value, Cache)), None)
        if cache is not None:
            cache.update_recurrent_state(out.cumsum(1)[:, -1], self.inner.layer_idx)
        return out


def test_a_state_that_no_rule_computes_is_refused() -> None:
    model = ours(with_large_weights(hybrid("lfm2")))
    model.model.layers[0].conv = Averages(model.model.layers[0].conv)
    with pytest.raises(ModelError, match="none of the rules"):
        StateLayout.of(model)
