"""The type that a checkpoint is held in when nobody says: its own, on a CPU if rows then stay apart, else float32."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.decoder import is_batch_invariant
from pilotfish.engine.model.decoder.shapes import is_aligned
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.quantize import save_quantised
from pilotfish.engine.native import multiplies
from pilotfish.engine.startup.build import load
from pilotfish.engine.startup.precision import HeldPrecision, held_as
from pilotfish.models import embedded_draft, embedded_target
from tests import fakes, loops, zoo

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def anything(_: torch.dtype) -> bool:
    """A CPU whose C multiplies every type."""
    return True


def no_bfloat16(dtype: torch.dtype) -> bool:
    return dtype != torch.bfloat16


def folder_of(tmp_path: Path, dtype: str | None, kind: type[PreTrainedConfig] = LlamaConfig, **shape: object) -> str:
    """A checkpoint of which there is the config alone, and in that no type where `dtype` is None."""
    kind(**SMALL | shape).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype", None)
    config |= {} if dtype is None else {"dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def held(
    name: str, device: torch.device = CPU, weights: str = "native", can=anything, **config: object
) -> HeldPrecision:
    return held_as(EngineConfig(target=name, **config), name, None, weights, device, multiplies=can)


@pytest.mark.parametrize(
    ("own", "on_cuda", "on_cpu", "without_bfloat16", "why"),
    [
        ("bfloat16", "bfloat16", "bfloat16", "float32", "the checkpoint's own"),
        ("float16", "float16", "float32", "float32", "float16 is not supported on cpu"),
        ("float32", "float32", "float32", "float32", "the checkpoint's own"),
        ("float64", "float32", "float32", "float32", "the checkpoint has float64"),
        (None, "bfloat16", "bfloat16", "float32", "the type of most stored weights"),
    ],
)
def test_auto_is_the_checkpoints_own_type_with_the_reason(
    own: str | None, on_cuda: str, on_cpu: str, without_bfloat16: str, why: str, tmp_path: Path
) -> None:
    name = folder_of(tmp_path, own)
    save_file({"wide": torch.zeros(9, dtype=torch.bfloat16), "norm": torch.zeros(8)}, tmp_path / "model.safetensors")
    found = held(name, CUDA), held(name), held(name, can=no_bfloat16)
    assert [h.type_name for h in found] == [on_cuda, on_cpu, without_bfloat16]
    assert all(h.weights == "native" for h in found)
    assert why in str(found[1])
    if own == "bfloat16":
        assert str(found[2]).startswith("float32: the C kernels do not support bfloat16 here")
    assert str(held(name, dtype="float32")) == "float32: configured"


def test_of_a_config_that_names_no_type_the_files_are_asked(tmp_path: Path) -> None:
    name = folder_of(tmp_path, None)
    files = [
        {"a": torch.zeros(4, 4, dtype=torch.float16), "steps": torch.zeros(99, dtype=torch.int64)},
        {"b": torch.zeros(3, 4)},
    ]
    for i, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
    assert str(held(name, CUDA)) == "float16: the type of most stored weights (none in its config)"
    save_file({"a": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "model-0.safetensors")
    (tmp_path / "model-1.safetensors").unlink()
    assert str(held(name, CUDA)) == "float32: the checkpoint has no type"
    (tmp_path / "model-0.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match=r"model-0.safetensors is truncated"):
        held(name, CUDA)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"loop": "rounds"}, "loop is rounds"),
        ({"attention": "sdpa"}, "attention is sdpa"),
    ],
)
def test_float32_where_torch_would_multiply_bfloat16_on_a_cpu(
    config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    name = folder_of(tmp_path, "bfloat16")
    assert held(name, **config).type_name == "float32"
    assert reason in held(name, **config).why
    assert held(name, **config | {"dtype": "bfloat16"}).type_name == "bfloat16", "asked for"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(LlamaConfig, {"intermediate_size": 40}), (MixtralConfig, {"num_local_experts": 2, "intermediate_size": 40})],
)
def test_float32_for_matrices_that_our_c_is_not_for(
    kind: type[PreTrainedConfig], shape: dict[str, object], tmp_path: Path
) -> None:
    name = folder_of(tmp_path, "bfloat16", kind, **shape)
    assert held(name).type_name == "float32"
    assert "do not support all its matrices" in held(name).why
    assert held(name, CUDA).type_name == "bfloat16"


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="needs a C compiler")
@pytest.mark.parametrize("family", zoo.FAMILIES[::3])
def test_what_is_foretold_of_packing_comes_true(family: str) -> None:
    made = zoo.decoder(copy.deepcopy(zoo.reference(family)).to(torch.bfloat16))
    assert is_batch_invariant(made) == is_aligned(made.architecture)


def test_models_outside_of_the_table_are_in_float32_and_nothing_else(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom").save_pretrained(tmp_path)
    name = str(tmp_path)
    assert (held(name).type_name, held(name, CUDA, dtype="bfloat16").type_name) == ("float32", "bfloat16")
    with pytest.raises(ModelError, match=r"weights is int8, but .* is a bloom model, which is not in the table"):
        held(name, weights="int8")


def test_rounded_weights_keep_what_suits_them(tmp_path: Path) -> None:
    """Beside int8 and int4 all else stays in float32, as it always was; fp8 is between bfloat16."""
    name = folder_of(tmp_path, "bfloat16")
    assert {held(name, weights=weights).type_name for weights in ("int8", "int4")} == {"float32"}
    assert held(name, CUDA, "fp8").type_name == "bfloat16"
    assert held(folder_of(tmp_path, "float32"), CUDA, "fp8").type_name == "bfloat16"
    save_quantised(str(embedded_target()), None, tmp_path / "int4", "int4")
    saved = held(str(tmp_path / "int4"))
    assert (saved.weights, saved.type_name) == ("int4", "float32")
    with pytest.raises(ModelError, match="saved in int4 requires cpu"):
        held(str(tmp_path / "int4"), CUDA)


def test_float16_is_refused_on_a_cpu(tmp_path: Path) -> None:
    name = folder_of(tmp_path, "float16")
    with pytest.raises(ModelError, match="use float32 on cpu"):
        held(name, dtype="float16")
    assert held(name, CUDA, dtype="float16").type_name == "float16"


def float32_copy(source: Path, tmp_path: Path) -> Path:
    """The same checkpoint, widened."""
    load_model(str(source), None, torch.float32, CPU).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def test_target_and_draft_each_have_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of the two is wide: drafts are kept, and the tokens are those of the target alone."""
    target, draft = str(embedded_target()), str(float32_copy(embedded_draft(), tmp_path))
    config = EngineConfig(target=target, draft=draft, threads=1)
    own = torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
    assert load(config, target, None, "native", CPU).dtype == own
    with caplog.at_level(logging.INFO, "pilotfish.engine.startup.build"):
        assert load(config, draft, None, "native", CPU).dtype == torch.float32
    assert f"{draft!r}: float32: the checkpoint's own" in caplog.messages
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    alone, pair = (LLM(target, by, threads=1, max_batch_size=2, speculation="fixed") for by in (None, draft))
    [want], [got] = (llm.generate("def add(a, b):\n    return ", params) for llm in (alone, pair))
    assert pair.engine.facts.dtype == str(own).removeprefix("torch.")
    assert got.token_ids == want.token_ids
    assert got.stats.accepted


@pytest.mark.parametrize(
    ("of_target", "of_draft"),
    [("float32", "bfloat16"), ("bfloat16", "float32")],
)
def test_rounds_of_a_pair_of_unlike_types(of_target: str, of_draft: str) -> None:
    """Each has an arena of its own type. A float32 target says what it says without drafts."""
    plain = zoo.reference("llama")
    pair = zoo.ours(plain, getattr(torch, of_target)), zoo.near(plain, dtype=getattr(torch, of_draft))
    engine = loops.engine_of(pair=pair)
    assert (engine.rounds.name, engine.facts.dtype) == ("rounds", of_target)
    asked = [loops.request(i) for i in range(4)]
    said = fakes.run(engine, asked)
    assert sum(finished.stats.accepted for finished in said.finished.values())
    engine.check_invariants()
    if of_target == "float32":
        assert all(said.tokens[one.request_id] == loops.plainly(one)[0] for one in asked)
