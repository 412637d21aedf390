"""GGUF files as models: weights are those of llama.cpp's reference to the last bit, and what is served follows them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn
from transformers import PreTrainedModel

from engine import LLM
from engine.errors import ModelError
from engine.model.checkpoint import end_tokens_of, read_config
from engine.model.gguf.container import Container
from engine.model.linear.grouped import GroupedLinear
from engine.model.published.base import Codes
from engine.model.published.gguf import BlockEmbedding, weights_in
from engine.model.published.load import fill
from engine.model.published.methods import without_quantisation
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from tests import gguf_files, zoo
from tests.families import generate
from tests.gguf_files import Written

FLOATS = (Type.F32, Type.F16, Type.BF16)
ON_KERNELS = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K)
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def mixed(name: str) -> Type:
    """A mixture of types as in most published files: the head and some matrices finer than the others."""
    finer = {
        "token_embd": Type.Q4_K,
        "output": Type.Q6_K,
        "attn_v": Type.Q6_K,
        "ffn_down": Type.Q5_K,
        "attn_q": Type.Q8_0,
    }
    return finer.get(name.split(".")[-2], Type.Q4_K)


@lru_cache
def file_of(folder: Path, family: str, kind: Type | str) -> Written:
    config = gguf_files.llama() if family == "llama" else gguf_files.qwen3()
    chosen = mixed if isinstance(kind, str) else kind
    name = kind if isinstance(kind, str) else kind.name
    return gguf_files.write(folder / f"{family}-{name}.gguf", config, chosen)


def loaded(path: Path, *, keeps_codes: bool) -> PreTrainedModel:
    config = without_quantisation(read_config(str(path), None))
    return fill(config, weights_in(Container.open(path)), str(path), torch.float32, keeps_codes=keeps_codes)


@pytest.mark.parametrize("kind", [*FLOATS, *ON_KERNELS, "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_are_those_of_the_reference_to_the_last_bit(family: str, kind: Type | str, folder: Path) -> None:
    written = file_of(folder, family, kind)
    expected = written.model.state_dict()
    found = loaded(written.path, keeps_codes=False).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if kind in ON_KERNELS or kind == "mixed":
        model = loaded(written.path, keeps_codes=True)
        matmuls = {name: m for name, m in model.named_modules() if isinstance(m, GroupedLinear)}
        assert len(matmuls) == 7 * 2 + 1, "all matrices of two layers, and the head"
        assert all(torch.equal(m.dequantised(), expected[f"{name}.weight"]) for name, m in matmuls.items())
        table = model.get_input_embeddings()
        assert isinstance(table, BlockEmbedding)
        ids = torch.tensor([[3, 0], [96, 3]])
        assert torch.equal(table(ids), expected["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize("family", gguf_files.families())
def test_every_family_is_served_as_transformers_runs_it(family: str, tmp_path: Path) -> None:
    config = gguf_files.families()[family]
    written = gguf_files.write(tmp_path / "model.gguf", config, Type.F16)
    read = read_config(str(written.path), None)
    assert read.rope_parameters == config.rope_parameters
    assert end_tokens_of(read, None) == {zoo.END}
    assert tokens(LLM(written.path, dtype="float32", **SMALL)) == reference(written.model)


SMALL = {"threads": 1, "max_model_len": 96, "max_batch_size": 4, "max_batch_tokens": 48, "device": "cpu"}


def tokens(llm: LLM, **speculation: object) -> list[list[int]]:
    asked = SpeculationParams(**speculation) if speculation else SpeculationParams(mode=SpeculationMode.OFF)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    return [list(done.token_ids) for done in llm.generate(zoo.prompts(4), params, speculation=asked)]


def reference(model: PreTrainedModel) -> list[list[int]]:
    return [generate(model, prompt, NEW_TOKENS) for prompt in zoo.prompts(4)]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.F16, "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dequantised_tokens_are_those_of_generate(family: str, kind: Type | str, folder: Path) -> None:
    written = file_of(folder, family, kind)
    llm = LLM(written.path, written.path, weights="dequantised", dtype="float32", **SMALL)
    expected = reference(written.model)
    assert tokens(llm) == expected
    for proposer in ("ngram", "model"):
        assert tokens(llm, mode=SpeculationMode.FIXED, proposer=proposer, num_draft_tokens=4) == expected


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K, "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_on_our_kernels_drafts_change_nothing(family: str, kind: Type | str, folder: Path) -> None:
    written, draft = file_of(folder, family, kind), file_of(folder, family, Type.Q4_0)
    llm = LLM(written.path, draft.path, **SMALL)
    expected = tokens(llm)
    for proposer in ("ngram", "model"):
        assert tokens(llm, mode=SpeculationMode.FIXED, proposer=proposer, num_draft_tokens=4) == expected
    alone = [
        llm.generate(p, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))[0].token_ids for p in zoo.prompts(4)
    ]
    assert [list(text) for text in alone] == expected


@pytest.mark.parametrize(
    ("kind", "bound"), [(Type.Q8_0, 0.02), (Type.Q4_0, 0.02), (Type.Q4_K, 0.02), (Type.Q6_K, 0.02)]
)
def test_logits_are_close_to_the_dequantised_model(kind: Type, bound: float, folder: Path) -> None:
    """What differs is the rounding of rows to 8 bits alone."""
    written = file_of(folder, "llama", kind)
    ours = loaded(written.path, keeps_codes=True)
    head, rows = ours.get_output_embeddings(), torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    exact = rows @ written.model.get_output_embeddings().weight.detach().t()
    assert float((head(rows) - exact).std()) < bound * float(exact.std())


def held_bytes(model: nn.Module) -> int:
    """Bytes of weights in memory, without those that stay in the file."""
    in_file = {module.raw.data_ptr() for module in model.modules() if isinstance(module, BlockEmbedding)}
    parts = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(size for at, size in parts.items() if at not in in_file)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_weights_take_as_much_memory_as_the_file(kind: Type, folder: Path) -> None:
    written = file_of(folder, "llama", kind)
    tensors = Container.open(written.path).tensors
    size = sum(tensor.num_bytes for tensor in tensors.values())
    held = held_bytes(loaded(written.path, keeps_codes=True)) + tensors["token_embd.weight"].num_bytes
    assert size <= held < 1.1 * size
    counted = [
        codes for codes in weights_in(Container.open(written.path)).values() if not isinstance(codes, torch.Tensor)
    ]
    assert sum(_counted(codes) for codes in counted) == sum(
        t.num_bytes for t in tensors.values() if not t.kind.is_float
    )


def _counted(codes: Codes) -> int:
    found = codes.num_bytes()
    assert found is not None
    return found


def test_a_family_that_is_not_read_is_named(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"model\.gguf is a mamba model; GGUF files are read of llama, qwen2"):
        read_config(str(tmp_path / "model.gguf"), None)
