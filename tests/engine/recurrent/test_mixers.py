"""Models with states over ragged batches: in chunks, in company, with drafts that are taken back, as their own pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pilotfish.engine.attention import choose, reference
from pilotfish.engine.attention.registry import Attend, Ragged
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.kv.states import StatePool
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.native import library
from pilotfish.engine.recurrent.arena import StateArena, bytes_per_slot, parts_of
from pilotfish.engine.types import KVCursor
from tests.classes import KINDS, tiny
from tests.zoo import VOCAB, as_served, family_config, with_large_weights
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
        self.model, self.arena, self.attend = model, KVArena(layout_of_model(model), 8, PAGE, DEVICE), attend
        pool = StatePool(num_slots=5, log_rows=LOG, snapshots=False)
        self.states, self.cursors = StateArena(parts_of(model), 5, LOG, DEVICE), [KVCursor(), KVCursor()]
        assert all(pool.open(cursor) for cursor in self.cursors)

    @torch.inference_mode()
    def run(self, *feeds: tuple[int, Seq[int], int]) -> list[Tensor]:
        """Feed (sequence, tokens, drafts among them) in one pass; logits of each sequence."""
        batch = RaggedBatch.of([self._feed(*feed) for feed in feeds], PAGE, DEVICE)
        out = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            logits_to_keep=torch.arange(sum(len(tokens) for _, tokens, _ in feeds)),
            ragged=Ragged(batch, self.arena, self.attend, self.states.during(batch)),
        )
        for who, tokens, _ in feeds:
            self.cursors[who].advance(self.cursors[who].kv_len + len(tokens))
        return list(out[0].split([len(tokens) for _, tokens, _ in feeds]))

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
    got = verify_in_turns(Served(as_served(model)), texts)
    for text, rows in zip(texts, got, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([text]), use_cache=False).logits[0, : len(rows)]
        assert len(rows) >= 8
        torch.testing.assert_close(rows, want, rtol=0, atol=float(2e-4 * want.std()))


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("name", [name for name in PACKED if name in NAMES])
def test_a_packed_row_has_the_same_bits_in_any_pass(name: str) -> None:
    served = as_served(with_large_weights(hybrid(name)))
    runs, text = Served(served, choose("auto", DEVICE, row_wise=True)), torch.randint(3, VOCAB, (19,)).tolist()
    (whole,) = runs.run((0, text, 0))
    parts = runs.run((1, text[:2], 0))
    parts += runs.run((1, text[2:10], 3))
    runs.cursors[1].rollback(9)  # of three drafts one is kept
    parts[-1] = parts[-1][:6]
    parts += runs.run((1, [text[8]], 0))
    parts += runs.run((1, text[9:], 0))
    assert torch.equal(torch.cat(parts), whole)


def test_layers_that_do_not_attend_have_no_keys_and_values_and_slots_take_what_the_parts_say() -> None:
    of_mamba, convolving = (as_served(with_large_weights(hybrid(name))) for name in ("nemotron_h", "lfm2"))
    kept = [layer for layer, kv in enumerate(layout_of_model(of_mamba).layers) if kv is not None]
    assert kept == [2]
    assert len(parts_of(of_mamba)) == 2, "a convolution and a recurrence"
    channels, convolutions, inputs = 32, 2, 2
    assert bytes_per_slot(parts_of(convolving), LOG) == convolutions * channels * 4 * (inputs + LOG)
    assert parts_of(as_served(plain("llama"))) == ()
