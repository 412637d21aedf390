"""What an adapter's folder may have, and why everything else is refused; and what its products add to a pass."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.adapters.peft import read_adapter
from pilotfish.engine.model.adapters.store import Adapters
from pilotfish.engine.model.decoder.attention import JoinedPart
from pilotfish.engine.model.linear.cuda import Fp8Linear
from pilotfish.engine.model.linear.low_rank import LowRankProduct
from tests import adapters, zoo

TARGETS = ["q_proj", "down_proj"]
Tensors = dict[str, Tensor]
KEY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return adapters.write(tmp_path / "a", zoo.reference("llama"), 4, 8.0, TARGETS)


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; supported: LORA"),
        ({"use_dora": True}, "use_dora is True; DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; fully trained modules"),
        ({"bias": "all"}, "bias is 'all'; supported: none"),
        ({"lora_bias": True}, "lora_bias is True; trained biases are not supported"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices is \[1\]; trained embeddings"),
        ({"target_parameters": ["experts"]}, "target_parameters is .*; parameters outside of linear layers"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is .*; repeated layers are not supported"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is .*; activated LoRA is not supported"),
        ({"some_later_field": 1}, "some_later_field is 1; this field is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; it requires a modified base model"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true, but the matrices of llama models"),
        ({"r": 0}, "r is 0; expected an integer of 1 or more"),
        ({"lora_alpha": None}, "lora_alpha is None; expected a number"),
        ({"target_modules": None}, "target_modules is None; expected a list of names"),
        ({"target_modules": "(q"}, r"target_modules has '\(q', which is not a valid regular expression"),
        ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern is .*; expected an object with a number"),
        ({"rank_pattern": {"q_proj": 5}}, r"q_proj has matrices of \[4, 32\] and \[32, 4\]; its rank is 5"),
        ({"target_modules": ["q_proj"]}, "matrices of '.*down_proj' are not in target_modules"),
        ({"target_modules": [*TARGETS, "o_proj"]}, "target_modules has 'o_proj', but there are no matrices"),
        ({"target_modules": ".*q_proj"}, "matrices of '.*down_proj' are not in target_modules"),
        (
            lambda t: t.pop(f"{KEY}.lora_B.weight"),
            "tensor '.*q_proj.lora_A.weight' has no counterpart '.*q_proj.lora_B.weight'",
        ),
        (lambda t: t.update({f"{KEY}.lora_magnitude_vector": torch.ones(3)}), "lora_magnitude_vector'; DoRA"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3)}),
            "changes of embeddings",
        ),
        (lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(3)}), "save_embedding_layers"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(3)}), "supported: lora_A and lora_B"),
        (lambda t: t[f"{KEY}.lora_A.weight"].fill_(float("nan")), "q_proj has NaN or infinite values"),
        (lambda t: t.update({f"{KEY}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}), "expected floats"),
        (lambda t: t.update({f"{KEY}.lora_A.weight": torch.ones(4, 31)}), "for 31 inputs and 32 outputs; expected 32"),
        (lambda t: t.update({f"{KEY}.lora_B.weight": torch.ones(33, 4)}), "for 32 inputs and 33 outputs; expected 32"),
        (
            lambda t: t.update({k.replace("layers.0", "layers.7"): t.pop(k) for k in [*t] if "layers.0" in k}),
            r"DecoderModel has no module 'model.layers.7.*: '7' not found",
        ),
    ],
)
def test_what_means_something_else_or_does_not_fit_is_refused(
    folder: Path, changed: dict[str, Any] | Callable[[Tensors], object], problem: str
) -> None:
    """Fields of the config are changed, or the file's tensors."""
    if isinstance(changed, dict):
        _config(folder, **changed)
    else:
        _tensors(folder, changed)
    with pytest.raises(ModelError, match=f"adapter 'a': .*{problem}"):
        Adapters(zoo.ours(zoo.reference("llama"))).load("a", folder)


def test_what_is_no_matmul_is_refused(folder: Path) -> None:
    _config(folder, target_modules=["input_layernorm", *TARGETS])
    named = "base_model.model.model.layers.0.input_layernorm"
    _tensors(folder, lambda t: t.update({f"{named}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}))
    with pytest.raises(ModelError, match=r"input_layernorm' of DecoderModel is a RMSNorm; expected a linear layer"):
        Adapters(zoo.ours(zoo.reference("llama"))).load("a", folder)


def test_matrices_in_8_bit_floats_are_refused(folder: Path) -> None:
    model = zoo.ours(zoo.reference("llama"))
    model.set_submodule("model.layers.0.self_attn.q_proj", Fp8Linear.__new__(Fp8Linear))
    place = model.get_submodule("model.layers.0.self_attn.q_proj")
    nn.Module.__init__(place)
    place.in_features = place.out_features = 32
    with pytest.raises(ModelError, match="q_proj' has fp8 weights"):
        Adapters(model).load("a", folder)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("adapter_config.json", None, "no readable adapter_config.json: No such file"),
        ("adapter_model.safetensors", None, "no readable adapter_model.safetensors: No such file"),
        ("adapter_config.json", "fifo", "adapter_config.json is not a regular file"),
        ("adapter_model.safetensors", "/dev/zero", "adapter_model.safetensors is not a regular file"),
        ("adapter_config.json", b"{", "cannot be read"),
        ("adapter_model.safetensors", b"\0" * 9, "cannot be read"),
    ],
)
def test_a_missing_or_invalid_file_is_reported(folder: Path, name: str, data: bytes | str | None, problem: str) -> None:
    (folder / name).unlink()
    if isinstance(data, bytes):
        (folder / name).write_bytes(data)
    elif data is not None:
        os.mkfifo(folder / "fifo")
        (folder / name).symlink_to(data)
    with pytest.raises(ModelError, match=problem):
        read_adapter(folder)


def test_a_name_is_loaded_once_and_weights_that_changed_are_seen(folder: Path) -> None:
    store = Adapters(zoo.ours(zoo.reference("llama")))
    fingerprint = store.load("a", folder).fingerprint
    with pytest.raises(ModelError, match="adapter 'a' is loaded already"):
        store.load("a", folder)
    assert store.load("b", folder, fingerprint).number == 2
    store.unload("a")
    with pytest.raises(ModelError, match="adapter 'a' is not loaded"):
        store.unload("a")
    _tensors(folder, lambda t: t[f"{KEY}.lora_A.weight"].add_(1e-3))
    with pytest.raises(ModelError, match=r"adapter 'a': the files in .* have changed since they were first loaded"):
        store.load("a", folder, fingerprint)
    assert list(store) == ["b"]


def test_a_target_in_shards_has_none(folder: Path) -> None:
    with pytest.raises(ModelError, match="require an unsharded model of the table"):
        Adapters(None).load("a", folder)


# -------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(("inputs", "rank"), [(30, 5), (64, 16), (48, 1)])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(inputs: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, rows = (torch.randn(n, m, generator=generator) for n, m in ((rank, inputs), (40, rank), (33, inputs)))
    product = LowRankProduct(a, b, row_wise=True)
    together = product.of(rows)
    assert torch.equal(together, torch.cat([product.of(row[None]) for row in rows]))
    assert torch.allclose(together, rows @ a.t() @ b.t(), atol=1e-4)


class _Twice(nn.Module):
    """Calls its matmul for half of the rows, as a mixture of experts does, or never."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.matmul, self.rows = nn.Linear(32, 32, bias=False), rows

    def forward(self, x: Tensor) -> Tensor:
        return x if self.rows is None else self.matmul(x[: self.rows])


@pytest.mark.parametrize(
    ("rows", "problem"), [(1, "was called with 1 rows; the pass has 2"), (None, "were not called as modules")]
)
def test_a_pass_that_does_not_show_every_row_fails(folder: Path, rows: int | None, problem: str) -> None:
    """Rather than to give some rows another adapter, or none."""
    model, odd = zoo.ours(zoo.reference("llama")), _Twice(rows)
    odd.in_features = odd.out_features = 32
    model.set_submodule("model.layers.0.self_attn.q_proj", odd.matmul)
    store = Adapters(model)
    number = store.load("a", folder).number
    with pytest.raises(ValueError, match=problem):
        _run(model, odd, store, Feed([1, 2], 0, [0], 1, adapter=number))


def _run(model: nn.Module, odd: nn.Module, store: Adapters, feed: Feed) -> None:
    """A pass of the matmuls that the adapter changes, one of them behind `odd`."""
    with store.during([feed]):
        odd(torch.ones(2, 32))
        for layer in model.model.layers:
            for matmul in (layer.self_attn.q_proj, layer.mlp.down_proj):
                matmul = matmul.joined.matmul if isinstance(matmul, JoinedPart) else matmul
                if matmul is not odd.matmul:
                    matmul(torch.ones(2, matmul.in_features))
