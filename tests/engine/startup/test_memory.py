"""Memory for keys and values: as asked, or what a card has free but for what passes need."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.startup.memory import GIB, ON_A_CPU, DeviceMemory, graph_budget, kv_gib, pass_bytes

LLAMA_8B = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def free(gib: float, held: float = 0, total: float = 200):
    return lambda device: DeviceMemory(int(gib * GIB), int(total * GIB), int(held * GIB))


def test_what_is_asked_for_and_what_a_cpu_has_is_given_without_a_look() -> None:
    for device, asked, given in ((CPU, 3.5, 3.5), (CUDA, 3.5, 3.5), (CPU, None, ON_A_CPU)):
        assert kv_gib(EngineConfig(target="t", kv_memory=asked), device, LLAMA_8B, lambda _: 1 // 0) == given


def test_a_card_gives_what_is_free_but_for_passes() -> None:
    """More of what is free is more for K/V, byte for byte but for the share held back; more rows are less."""
    small, large = (EngineConfig(target="t", max_batch_size=size) for size in (8, 128))
    at_120, at_60 = (kv_gib(small, CUDA, LLAMA_8B, free(gib)) for gib in (120, 60))
    assert at_120 - at_60 == pytest.approx(57, abs=0.1)
    assert 100 < at_120 < 120 * 0.95 - pass_bytes(small, LLAMA_8B) / GIB
    assert kv_gib(large, CUDA, LLAMA_8B, free(120)) < at_120
    drawn = 128 * 9 * 128256 * 8  # the noise of one draw for 128 sequences and 8 drafts each
    assert pass_bytes(large, LLAMA_8B) > 3 * drawn


@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("others", [0, 1])
def test_engines_that_share_a_card_have_a_part_each(engines: int, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 10 GiB on a card of 80: whether the others are loaded or not, and all of them fit together."""
    config = EngineConfig(target="t", max_batch_size=8, engines_per_device=engines)
    alone = EngineConfig(target="t", max_batch_size=8)
    part = 80 / engines
    got = kv_gib(config, CUDA, LLAMA_8B, free(70 - others * part, 10, 80))
    assert got == pytest.approx(kv_gib(alone, CUDA, LLAMA_8B, free(part - 10)))
    assert engines * (10 + got + pass_bytes(config, LLAMA_8B) / GIB) < 80
    assert kv_gib(config.model_copy(update={"kv_memory": got - 1}), CUDA, LLAMA_8B, free(70, 10, 80)) == got - 1
    for kv_memory, held in ((got + 1, 10), (None, part), (None, 79)):
        asked = config.model_copy(update={"kv_memory": kv_memory})
        with pytest.raises(ModelError, match=rf"kv_memory is .* with {engines} engines per device \(standby"):
            kv_gib(asked, CUDA, LLAMA_8B, free(80 - held, held, 80))
    assert kv_gib(config, CPU, LLAMA_8B, lambda _: 1 // 0) == ON_A_CPU
    # Of what is free once K/V are allocated no more is the engine's than its part leaves: here nothing, and 20 GiB.
    for held, is_left in ((part, False), (part - 20, True)):
        monkeypatch.setattr(DeviceMemory, "of", free(80 - held, held, 80))
        assert graph_budget(config, LLAMA_8B, CUDA).is_left is is_left


def test_what_long_contexts_share_out_is_counted() -> None:
    """Parts of attention before they are merged: 8 sequences of 4 drafts see 131072 keys, in a model of 32 heads."""
    short, long = (
        EngineConfig(target="t", max_batch_size=8, max_batch_tokens=40, max_model_len=length, num_draft_tokens=4)
        for length in (256, 131072)
    )
    model = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, max_position_embeddings=131072)
    cell = (128 + 2) * 4  # bytes of one row of one head
    assert pass_bytes(long, model) - pass_bytes(short, model) == 40 * 32 * 81 * cell


def test_a_full_gpu_is_reported() -> None:
    with pytest.raises(ModelError, match=r"leaves none for keys and values"):
        kv_gib(EngineConfig(target="t", max_batch_size=64), CUDA, LLAMA_8B, free(1.5))
