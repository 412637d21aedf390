"""GGUF files as models: weights are those of llama.cpp's reference to the last bit, and what is served follows them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import cast

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn
from transformers import PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import end_tokens_of, read_config, weights_size
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.gguf.container import Container, gguf_file
from pilotfish.engine.model.linear.experts import RoutedExperts
from pilotfish.engine.model.linear.grouped import GroupedLinear
from pilotfish.engine.model.published.base import CodedEmbedding
from pilotfish.engine.model.published.gguf import weights_in
from pilotfish.engine.startup.build import load
from tests import gguf_files, zoo
from tests.covering import some
from tests.drawn import numbers
from tests.gguf_files import Written

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@lru_cache
def file_of(folder: Path, family: str, kind: Type | str) -> Written:
    config = gguf_files.llama() if family == "llama" else gguf_files.qwen3()
    chosen = gguf_files.mixed if isinstance(kind, str) else kind
    name = kind if isinstance(kind, str) else kind.name
    return gguf_files.write(folder / f"{family}-{name}.gguf", config, chosen)


def floats(path: Path) -> PreTrainedModel:
    """Transformers' module."""
    return load_model(str(path), None, torch.float32, CPU)


def decoder(path: Path, dtype: str = "float32") -> DecoderModel:
    """With the codes of the file."""
    return cast("DecoderModel", load(EngineConfig(target=str(path), dtype=dtype), str(path), None, "native", CPU))


@pytest.mark.parametrize(("family", "kind"), [("llama", "mixed"), ("qwen3", "mixed"), ("llama", Type.IQ3_S)])
def test_weights_are_those_of_the_reference_to_the_last_bit(family: str, kind: Type | str, folder: Path) -> None:
    written = file_of(folder, family, kind)
    expected = written.model.state_dict()
    found = floats(written.path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if kind == "mixed":  # the other has no kernel
        codes = weights_in(Container.open(written.path))
        made = {key: each.grouped() for key, each in codes.items() if not isinstance(each, torch.Tensor)}
        assert len(made) == 7 * 2 + (1 if written.model.config.tie_word_embeddings else 2), "all matrices"
        assert all(torch.equal(matmul.dequantised(), expected[key]) for key, matmul in made.items())
        table = decoder(written.path).get_input_embeddings()
        assert isinstance(table, CodedEmbedding)
        ids = torch.tensor([[3, 0], [96, 3]])
        assert torch.equal(table(ids), expected["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize(("family", "kind"), [("qwen3moe", "mixed"), ("gpt-oss", Type.MXFP4)])
def test_each_expert_keeps_its_codes(family: str, kind: Type | str, tmp_path: Path) -> None:
    config = gguf_files.config_of(family, gguf_files.WIDE | {"num_hidden_layers": 1})
    written = gguf_files.write(tmp_path / "model.gguf", config, gguf_files.mixed if isinstance(kind, str) else kind)
    model = decoder(written.path)
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    stacks = next(m for m in written.model.modules() if hasattr(m, "down_proj") and hasattr(m, "gate_up_proj"))
    for name, matmuls in (("gate_up_proj", experts.ups), ("down_proj", experts.downs)):
        expected = getattr(stacks, name).transpose(1, 2) if family == "gpt-oss" else getattr(stacks, name)
        found = torch.stack([cast("GroupedLinear", matmul).codes.dequantised() for matmul in matmuls])
        assert torch.equal(found, expected)
    container = Container.open(written.path)
    counted = [codes.num_bytes for codes in weights_in(container).values() if not isinstance(codes, torch.Tensor)]
    stored = sum(t.num_bytes for t in container.tensors.values() if not t.kind.is_float)
    assert stored <= sum(counted) < (1.3 if kind == Type.MXFP4 else 1.1) * stored


def test_experts_whose_halves_are_of_two_types_are_dequantised(tmp_path: Path) -> None:
    config = gguf_files.config_of("qwen3moe", gguf_files.WIDE | {"num_hidden_layers": 1})
    written = gguf_files.write(
        tmp_path / "model.gguf", config, lambda name: Type.Q8_0 if "gate_exps" in name else Type.Q4_0
    )
    model, found, expected = decoder(written.path), floats(written.path).state_dict(), written.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    assert not any(isinstance(matmul, GroupedLinear) for matmul in experts.ups)
    assert all(isinstance(matmul, GroupedLinear) for matmul in (*experts.downs, model.model.layers[0].self_attn.o_proj))
    x, chosen, weights = (
        numbers(5, 256),
        torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]]),
        torch.full((5, 2), 0.5),
    )
    with torch.inference_mode():
        want = written.model.get_submodule("model.layers.0.mlp.experts")(x, chosen, weights)
    assert float((experts(x, chosen, weights) - want).std()) < 0.02 * float(want.std())


def test_a_model_in_several_files_is_named_by_any_of_them(folder: Path, tmp_path: Path) -> None:
    whole = file_of(folder, "qwen3", Type.Q8_0)
    written = gguf_files.write(tmp_path / "model.gguf", gguf_files.qwen3(), Type.Q8_0, tensors_of_a_part=9)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    expected = whole.model.state_dict()
    for name in (tmp_path, *parts):
        found = floats(Path(str(gguf_file(name)))).state_dict()
        assert all(torch.equal(found[weight], expected[weight]) for weight in expected)
    assert weights_size(str(tmp_path), None) == sum(part.stat().st_size for part in parts)
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is part 2 of 3 by its name, but part 3 of 3"):
        Container.open(written.path)
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*00002-of-00003\.gguf: No such file"):
        Container.open(parts[2])
    parts[1].write_bytes(second)
    alone = parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"alone\.gguf is part 1 of 1 by its name, but part 1 of 3 by its metadata"):
        Container.open(alone)


@pytest.mark.parametrize("family", some(gguf_files.families(), ("llama", "gemma3", "granite", "gpt-oss")))
def test_every_family_is_read_as_transformers_has_it(family: str, tmp_path: Path) -> None:
    config = gguf_files.config_of(family)
    written = gguf_files.write(tmp_path / "model.gguf", config, Type.F16)
    read = read_config(str(written.path), None)
    assert read.rope_parameters == config.rope_parameters
    assert end_tokens_of(read, None) == {zoo.END}
    model = floats(written.path)
    found, expected = model.state_dict(), written.model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        for each in (model, written.model):
            each.set_attn_implementation("eager")
        assert torch.equal(model(ids, use_cache=False).logits, written.model(ids, use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_codes_has_the_type_of_its_rows(dtype: torch.dtype, folder: Path) -> None:
    """It has no matrix of floats to tell, and norms are scaled in float32 once they are fused."""
    model = decoder(file_of(folder, "llama", Type.Q8_0).path, str(dtype).removeprefix("torch."))
    assert model.dtype == dtype
    assert model.get_input_embeddings()(torch.tensor([3])).dtype == dtype


def held_bytes(model: nn.Module) -> int:
    """Bytes of weights in memory, without those that stay in the file."""
    codes = [module.packed or module.codes for module in model.modules() if isinstance(module, GroupedLinear)]
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers(), *codes))


def test_weights_take_as_much_memory_as_the_file(folder: Path) -> None:
    written = file_of(folder, "llama", Type.Q4_0)
    tensors = Container.open(written.path).tensors
    size = sum(tensor.num_bytes for tensor in tensors.values())
    held = held_bytes(decoder(written.path)) + tensors["token_embd.weight"].num_bytes
    assert size <= held < 1.1 * size


def test_a_family_that_is_not_read_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"model\.gguf: general\.architecture is 'mamba'; supported: cohere2, .*smol"):
        read_config(str(tmp_path / "model.gguf"), None)
