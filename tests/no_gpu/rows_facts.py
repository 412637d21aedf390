"""Row kernels, the 4-bit matmul and experts compiled as for a card, and what a fused decoder layer launches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel

from engine.attention.registry import Ragged
from engine.kernels import experts, reference, rows, w4
from engine.kernels.args import GROUP, WORDS
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.fusion.fuse_cuda import fuse_for_cuda, round_ahead
from engine.model.fusion.kernel_layers import LayerOps
from engine.model.linear.experts import StackedExperts
from engine.model.linear.fp8 import Fp8Linear, to_fp8
from engine.model.linear.w4 import W4Linear, to_w4
from engine.model.runner import kv_layout
from engine.native.experts import ExpertGate
from tests import zoo
from tests.no_gpu.stand_in import Specialised, StandIn

SIZES = (2048, 29568)  # of rows: a small model's hidden size, and the largest MLP that is common
MATRICES = ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 28672))  # in and out, of an 8B model
_COMMON = {
    "vocab_size": zoo.VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": zoo.END,
}  # fmt: skip
_FAMILIES = {"llama": LlamaConfig, "gemma2": Gemma2Config}
_VIEWS = ("view", "unsafe_view", "empty", "detach", "alias")  # no kernel, whatever their schema says


def row_kernels() -> None:
    dtype = torch.bfloat16
    for size in SIZES:
        x, scale, both = torch.zeros(3, size, dtype=dtype), torch.zeros(size), torch.zeros(3, 2 * size, dtype=dtype)
        rows.add_norm(x, x, scale, 1e-5)
        rows.add_norm_round(x, x, scale, 1e-5, (scale, 1e-5))
        rows.gate_round(both, "gelu_tanh")
        rows.round_rows(x)
    x, scale = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096)
    rows.add_norm(x, None, scale, 1e-5)
    rows.add_norm_round(x, None, scale, 1e-5)
    rows.gate(torch.zeros(3, 8192, dtype=dtype), "silu")
    arena, cos = torch.zeros(9, 2, 128, dtype=dtype), torch.zeros(3, 128, dtype=dtype)
    norms = torch.zeros(128), torch.zeros(128)
    where = torch.zeros(3, dtype=torch.int64)
    rows.rotate_and_write(torch.zeros(3, 8 * 128, dtype=dtype), cos, cos, where, arena, arena, norms)


def matmuls() -> None:
    counts = torch.zeros(999, dtype=torch.int32)
    for inputs, outputs in MATRICES:
        words = torch.zeros(inputs // GROUP, outputs, WORDS, dtype=torch.int16)
        scale = torch.zeros(inputs // GROUP, outputs, dtype=torch.float16)
        for num_rows in (1, 2, 7, 15, 16, 17, 32, 33, 40, 64, 65, 128, 200):
            w4.matmul(torch.zeros(num_rows, inputs, dtype=torch.bfloat16), words, scale, None, counts)


def mixtures() -> None:
    """As Qwen3-30B-A3B has them, but fewer."""
    up, down = torch.zeros(16, 2 * 768, 2048, dtype=torch.bfloat16), torch.zeros(16, 2048, 768, dtype=torch.bfloat16)
    mixture = StackedExperts(up, down, None, ExpertGate(), experts.mix)
    for num_rows in (1, 17, 300):
        chosen = torch.zeros(num_rows, 8, dtype=torch.int64)
        mixture(torch.zeros(num_rows, 2048, dtype=torch.bfloat16), chosen, chosen.bfloat16())


class _Counted(TorchDispatchMode):
    """Operations of torch that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").strip("_")
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not is_view and not any(part in name for part in _VIEWS):
            self.names.append(name)
        if name == "scaled_mm":  # on CPUs only newer versions have scales by row
            rows, matrix, row_scale, scale, *_ = args
            return (rows.float() @ matrix.float() * row_scale * scale).bfloat16()
        return func(*args, **(kwargs or {}))


def model_of(family: str, weights: str, layers: int) -> PreTrainedModel:
    """Fused by what the kernels mean, for here nothing runs; then given the kernels."""
    config = _FAMILIES[family](**_COMMON, num_hidden_layers=layers, **{"head_dim": 32} if family == "gemma2" else {})
    model = zoo.ours(zoo.with_large_weights(config)).to(torch.bfloat16)
    fuse_for_cuda(model, reference)
    if weights == "fp8":
        to_fp8(model)
        with _Counted():
            round_ahead(model, reference)
    if weights == "int4":
        to_w4(model, reference.w4_matmul)
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = LayerOps.of(rows, experts)
        if isinstance(module, Fp8Linear):
            module.round_rows = rows.round_rows
        if isinstance(module, W4Linear):
            module.multiply = w4.matmul
    return model


def launched(stand_in: StandIn, family: str, weights: str, layers: int) -> list[str]:
    """Everything that one pass of a model launches; attention, which has tests of its own, counts once."""
    model = model_of(family, weights, layers)
    batch = RaggedBatch.of([Feed([3], 4, [0]), Feed([4, 5], 9, [1])], 16, model.device)
    counted = _Counted()

    def attend(query: Tensor, *_: Any) -> Tensor:
        counted.names.append("attention")
        return torch.empty_like(query)

    arena = KVArena(kv_layout(model.config, model.dtype), 2, 16, model.device)
    stand_in.launches.clear()
    with torch.inference_mode(), counted:
        model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False,
            logits_to_keep=batch.logit_rows, ragged=Ragged(batch, arena, attend),
        )  # fmt: skip
    return counted.names + stand_in.launches


def of_a_layer(stand_in: StandIn, family: str, weights: str) -> list[str]:
    """What a model of three layers launches beyond one of two."""
    more = launched(stand_in, family, weights, 3)
    for name in launched(stand_in, family, weights, 2):
        more.remove(name)
    return sorted(more)


def compiled(new: Iterable[Specialised]) -> Iterator[dict[str, Any]]:
    for each in new:
        used, code = each.resources, each.kernel.asm["ptx"]
        copies = {int(size, 16) for size in re.findall(r"cp\.async\.\w+\.shared\.global.*?, 0x(\w+)", code)}
        yield {
            "name": each.name, "registers": used.registers, "stack": used.stack, "shared": used.shared,
            "copies": sorted(copies), "tensor_cores": "wgmma" in code, "wide_loads": "ld.global.v4.b32" in code,
        }  # fmt: skip


def facts(stand_in: StandIn) -> dict[str, Any]:
    """Of the row kernels and of the matmul, and how many specialisations a mixture of experts has of each kernel."""
    row_kernels()
    found = {"rows": list(compiled(stand_in.newest()))}
    matmuls()
    found["w4"] = list(compiled(stand_in.newest()))
    mixtures()
    return found | {"experts": Counter(each.name for each in stand_in.newest())}


def layers(stand_in: StandIn) -> dict[str, list[str]]:
    return {f"{family} {w}": of_a_layer(stand_in, family, w) for family in _FAMILIES for w in ("bf16", "fp8", "int4")}
