"""Multi-token prediction: the layer inside a checkpoint drafts by the paper's equations, or is refused."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.proposers.heads import load_heads
from pilotfish.engine.proposers.heads.mtp import first_layer, load_mtp
from pilotfish.engine.startup.build import build_engine
from tests import heads, published, zoo
from tests.covering import some
from tests.engine.proposers.heads import mtp_checkpoints as checkpoints
from tests.engine.proposers.heads.mtp_checkpoints import FAMILIES, SavedWithMTP
from tests.scripted import drafts_from

TEXTS = (list(range(3, 15)), [5, 90], [7, 7, 7, 8, 7, 7, 7, 8, 7, 7, 7])
COUNT = 5


def engine_of(folder: str, **config: object) -> Engine:
    return build_engine(
        EngineConfig(target=folder, **{"draft": "mtp", "proposer": "mtp", "warm_up_seconds": 0, "max_batch_size": 4,
                                       "threads": 1, **config})
    )  # fmt: skip


def assert_drafts(engine: Engine, saved: SavedWithMTP) -> None:
    """From the plain target's features, shown at once and in three parts."""
    mtp = engine.proposers.by_name["mtp"]
    for tokens in TEXTS:
        stop, states = len(tokens) - 1, {FINAL: saved.features(tokens[:-1])}
        for step in (stop, -(-stop // 3)):
            sequence = heads.opened(tokens)
            for start in range(0, stop, step):
                heads.show(mtp, sequence, states, start, min(start + step, stop))
            assert drafts_from(mtp, [sequence], [COUNT]) == (tuple(saved.drafts(tokens, COUNT)),)


# ------------------------------------------------------------------------------------------------ what it drafts

# Of each family how its checkpoint is written.
WAYS: dict[str, dict[str, bool]] = {
    "deepseek-v3": {"own": True},
    "glm-4-moe": {"copies": True},
    "glm-4-moe-lite": {},
    "qwen-3-next": {"sharded": True},
    "qwen-3.5": {},
    "qwen-3.5-moe": {},
}


@pytest.mark.parametrize("family", some(FAMILIES, ["deepseek-v3", "glm-4-moe", "qwen-3-next", "qwen-3.5"]))
def test_drafts_are_those_of_the_papers_equations(tmp_path: Path, family: str) -> None:
    saved = checkpoints.save(family, tmp_path, **WAYS[family])
    engine = engine_of(saved.folder, dtype="float32")
    assert_drafts(engine, saved)
    head, target = engine.proposers.by_name["mtp"].head, engine.runner.model
    ends = target.get_input_embeddings(), target.get_output_embeddings()
    if "own" in WAYS[family]:
        assert not {*map(id, head.ends)} & {*map(id, ends)}
        assert engine_of(saved.folder, dtype="bfloat16").proposers.by_name["mtp"].head.dtype == torch.bfloat16
    else:
        assert all(mine is its for mine, its in zip(head.ends, ends, strict=True))


@pytest.mark.slow
def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    """FP8 in blocks, as DeepSeek's own checkpoint has it, and GPTQ; the target's layers are in floats."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": published.GROUP, "desc_act": False, "sym": True}
    in_blocks = partial(published.fp8, block=(16, 16), suffix="_scale_inv")
    for settings, write in ((fp8, in_blocks), (gptq, published.gptq)):
        saved = checkpoints.save("glm-4-moe", tmp_path / settings["quant_method"])
        query = saved.whole.model.layers[-1].self_attn.q_proj.weight
        joining, saved.parts["eh_proj"] = write("model.layers.2.eh_proj", saved.parts["eh_proj"])
        asking, query.data = write("model.layers.2.self_attn.q_proj", query.data)
        checkpoints.change(saved.folder, joining, without="layers.2.eh_proj.weight")
        checkpoints.change(saved.folder, asking, without="layers.2.self_attn.q_proj.weight")
        config = Path(saved.folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
        assert_drafts(engine_of(saved.folder, dtype="float32"), saved)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavedWithMTP]:
    """Of each way to name its tensors."""
    folder = tmp_path_factory.mktemp("whole")
    return {family: checkpoints.save(family, folder / family) for family in ("deepseek-v3", "qwen-3.5")}


Z = torch.zeros


@pytest.mark.parametrize(
    ("said", "changed", "without", "family"),
    [
        (r"has no MTP layers among its tensors \(num_nextn_predict_layers .* is 1\)", {}, "layers.2.", "deepseek-v3"),
        (r"is missing 1 weights, including model\.hnorm\.weight", {}, "layers.2.hnorm", "deepseek-v3"),
        (r"is missing 1 weights, including model\.norm\.weight", {}, "layers.2.shared_head.norm", "deepseek-v3"),
        (r"is missing 1 weights, including model\.layers\.0\.mlp\.experts\.gate_up", {}, "layers.2.mlp.experts.1.up",
         "deepseek-v3"),
        (r"eh_proj\.weight has shape \[32, 32\]; expected \[32, 64\]", {"layers.2.eh_proj": Z(32, 32)}, "",
         "deepseek-v3"),
        (r"o_proj\.weight has shape \[32, 8\]", {"layers.2.self_attn.o_proj": Z(32, 8)}, "", "deepseek-v3"),
        (r"has an unexpected tensor model\.layers\.0\.extra\.weight in its MTP", {"layers.2.extra": Z(2)}, "",
         "deepseek-v3"),
        (r"unexpected tensor model\.layers\.0\.other\.weight in its MTP layer", {"mtp.other": Z(2)}, "", "qwen-3.5"),
    ],
)  # fmt: skip
def test_layers_that_are_not_whole(
    tmp_path: Path, whole: dict[str, SavedWithMTP], said: str, changed: dict[str, Tensor], without: str, family: str
) -> None:
    folder = shutil.copytree(whole[family].folder, tmp_path / "changed")
    named = {f"{'' if name.startswith('mtp.') else 'model.'}{name}.weight": x for name, x in changed.items()}
    checkpoints.change(str(folder), named, without=without)
    with pytest.raises(ModelError, match=said):
        load_mtp(str(folder), None, whole[family].target)


def test_checkpoints_that_cannot_have_such_layers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a llama model, whose MTP layers are not supported"):
        load_mtp(str(tmp_path), None, zoo.reference("llama"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a GGUF file, whose MTP layers are not supported"):
        load_mtp(str(file), None, zoo.reference("qwen-3.5"))


# -------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("sharded", [True, False])
def test_the_log_says_that_there_are_such_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sharded: bool
) -> None:
    saved = checkpoints.save("qwen-3.5", tmp_path / "with", sharded=sharded)
    saved.target.save_pretrained(tmp_path / "without")
    with caplog.at_level(logging.INFO, "pilotfish.engine.proposers.heads.mtp"):
        for folder in ("without", "with"):
            assert not load_heads({}, EngineConfig(target=str(tmp_path / folder)), saved.target)
    [said] = (record.getMessage() for record in caplog.records)
    assert said == f"{saved.folder!r} has MTP layers; use them for drafting with --draft mtp"


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [("glm-4-moe", "model.layers.2.enorm", "model.layers.3.enorm"), ("qwen-3.5", "mtp.layers.0.x", "mtp.layers.1.x")],
)
def test_the_first_of_several_layers_drafts(family: str, first: str, second: str) -> None:
    stored = {f"{first}.weight": torch.zeros(1), f"{second}.weight": torch.ones(1)}
    found, layers = first_layer(stored, checkpoints.config_of(family))
    assert ([tensor.item() for tensor in found.values()], layers) == ([0.0], 2)


def test_names_inside_of_a_model_that_also_sees() -> None:
    config = zoo.family_config("glm-4-moe")
    config.part_of = "a model that also sees"
    names = [f"model.language_model.layers.{name}.weight" for name in ("2.enorm", "1.input_layernorm")]
    found, layers = first_layer(dict.fromkeys(names, torch.zeros(1)), config)
    assert (list(found), layers) == (["model.enorm.weight"], 1)
