"""Multi-token prediction: the layer inside a checkpoint drafts by the paper's equations, or is refused."""

from __future__ import annotations

import json
import logging
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.model.tap import FINAL
from engine.params import SpeculationMode, SpeculationParams
from engine.proposers.heads.mtp import load_mtp
from engine.proposers.heads.mtp_tensors import MTPFinder, read_wanted
from engine.startup.build import build_engine
from tests import fakes, heads, published, zoo
from tests.engine.proposers.heads import mtp_checkpoints as checkpoints
from tests.engine.proposers.heads.mtp_checkpoints import FAMILIES, SavedWithMTP

TEXTS = (list(range(3, 15)), [5, 90], [7, 7, 7, 8, 7, 7, 7, 8, 7, 7, 7])
COUNT = 5


def engine_of(folder: str, **config: object) -> Engine:
    return build_engine(
        EngineConfig(target=folder, **{"mtp": True, "proposer": "mtp", "warm_up_seconds": 0, "max_batch_size": 4,
                                       "threads": 1, **config})
    )  # fmt: skip


def served_drafts(engine: Engine, saved: SavedWithMTP, tokens: list[int], *, parts: int = 1) -> list[int]:
    """Drafts behind `tokens`, from the plain target's features, shown in so many parts."""
    mtp, sequence, stop = engine.proposers.by_name["mtp"], heads.opened(tokens), len(tokens) - 1
    states, step = {FINAL: saved.features(tokens[:-1])}, -(-stop // parts)
    for start in range(0, stop, step):
        heads.show(mtp, sequence, states, start, min(start + step, stop))
    [drafts] = mtp.propose([sequence], [COUNT]).tokens
    return list(drafts)


def assert_drafts(engine: Engine, saved: SavedWithMTP) -> None:
    for tokens in TEXTS:
        want = saved.drafts(tokens, COUNT)
        assert served_drafts(engine, saved, tokens) == want
        assert served_drafts(engine, saved, tokens, parts=3) == want, "shown in parts"


# ------------------------------------------------------------------------------------------------ what it drafts


slow = partial(pytest.param, marks=pytest.mark.slow)
QUICK = {("deepseek-v3", True), ("qwen-3-next", True), ("qwen-3.5", False), ("glm-4-moe-lite", True)}


@pytest.mark.parametrize(
    ("family", "fused"), [pair if pair in QUICK else slow(*pair) for pair in product(FAMILIES, (True, False))]
)
def test_drafts_are_those_of_the_papers_equations(tmp_path: Path, family: str, fused: bool) -> None:
    saved = checkpoints.save(family, tmp_path)
    assert_drafts(engine_of(saved.folder, fuse=fused), saved)


@pytest.mark.parametrize("family", ["deepseek-v3", slow("glm-4-moe")])
def test_transformers_own_layer_drafts_the_same(tmp_path: Path, family: str) -> None:
    """Its class reads the checkpoint by names and renamings of its own."""
    saved = checkpoints.save(family, tmp_path)
    saved.target.config._name_or_path, saved.target.config.dtype = saved.folder, torch.float32
    saved.target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{saved.target.config.num_hidden_layers}\."]
    theirs = MtpModel.from_pretrained(saved.target).eval()
    for tokens in TEXTS:
        positions = torch.arange(1, len(tokens))[None]
        drafts, _, _ = theirs(
            torch.tensor([tokens[1:]]), saved.features(tokens[:-1])[None], None, positions, None, full_input_ids=None
        )
        assert drafts[0].tolist() == saved.drafts(tokens, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_embedding_and_an_output_matrix_of_its_own(tmp_path: Path, dtype: str) -> None:
    saved = checkpoints.save("deepseek-v3", tmp_path, own=True)
    engine = engine_of(saved.folder, dtype=dtype)
    assert engine.proposers.by_name["mtp"].head._output.weight.dtype == getattr(torch, dtype)
    if dtype == "float32":
        assert_drafts(engine, saved)


def test_copies_of_the_targets_matrices_are_not_kept(tmp_path: Path) -> None:
    saved = checkpoints.save("glm-4-moe", tmp_path, copies=True)
    engine = engine_of(saved.folder)
    assert_drafts(engine, saved)
    chain, target = engine.proposers.by_name["mtp"].head, engine.runner.model
    assert chain._embedding is target.get_input_embeddings()
    assert chain._output is target.get_output_embeddings()
    assert len(chain._model.get_input_embeddings().weight) == 1


@pytest.mark.slow
def test_only_the_files_with_its_tensors_are_read(tmp_path: Path) -> None:
    saved = checkpoints.save("qwen-3-next", tmp_path, sharded=True)
    assert_drafts(engine_of(saved.folder), saved)
    finder = MTPFinder.of(saved.target.config)
    assert finder is not None
    found = read_wanted(saved.folder, None, finder)
    assert {name for name in found if not name.startswith("mtp.")} == {"model.embed_tokens.weight", "lm_head.weight"}
    index = json.loads(Path(saved.folder, "model.safetensors.index.json").read_text())
    assert {name for name in index["weight_map"] if name.startswith("mtp.")} <= found.keys()


@pytest.mark.slow
def test_the_first_of_several_layers_drafts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for family, first, second in (
        ("glm-4-moe", "model.layers.2.", "model.layers.3."),
        ("qwen-3.5", "mtp.layers.0.", "mtp.layers.1."),
    ):
        saved = checkpoints.save(family, tmp_path / family)
        [file] = Path(saved.folder).glob("*.safetensors")
        more = {
            name.replace(first, second): torch.randn_like(x) for name, x in load_file(file).items() if first in name
        }
        checkpoints.change(saved.folder, more)
        with caplog.at_level(logging.INFO, "engine.proposers.heads.mtp"):
            engine = engine_of(saved.folder)
        assert f"{saved.folder!r} has 2 MTP layers; the first one drafts" in caplog.text
        assert_drafts(engine, saved)


@pytest.mark.slow
def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    """FP8 in blocks, as DeepSeek's own checkpoint has it, and GPTQ; the target's layers are in floats."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": published.GROUP, "desc_act": False, "sym": True}
    writers = {
        "fp8": (fp8, lambda name, x: published.fp8(name, x, block=(16, 16), suffix="_scale_inv")),
        "gptq": (gptq, published.gptq),
    }
    for kind, (settings, write) in writers.items():
        saved = checkpoints.save("glm-4-moe", tmp_path / kind)
        changed, last = dict[str, Tensor](), saved.whole.model.layers[-1]
        for path, holder, name in (("eh_proj", saved.parts, "eh_proj"), ("self_attn.q_proj", last.self_attn, "q_proj")):
            plain = holder[name] if isinstance(holder, dict) else getattr(holder, name).weight.data
            tensors, meant = write(f"model.layers.2.{path}", plain)
            changed |= tensors
            if isinstance(holder, dict):
                holder[name] = meant
            else:
                getattr(holder, name).weight.data = meant
        without = [] if kind == "fp8" else ["layers.2.eh_proj.weight", "layers.2.self_attn.q_proj.weight"]
        for name in without:
            checkpoints.change(saved.folder, {}, without=name)
        checkpoints.change(saved.folder, changed)
        config = Path(saved.folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
        assert_drafts(engine_of(saved.folder, dtype="float32"), saved)


# ------------------------------------------------------------------------------------------------ planted layers


def accepted(engine: Engine, **law: float) -> tuple[int, int]:
    """Drafts that were accepted, and all of them, over some prompts."""
    wish = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=4)
    asked = [fakes.request(p, name=str(i), wish=wish, max_tokens=30, ignore_eos=True, **law)
             for i, p in enumerate(zoo.prompts(3))]  # fmt: skip
    ended = fakes.run(engine, asked).finished.values()
    return sum(f.stats.accepted for f in ended), sum(f.stats.drafted for f in ended)


@pytest.mark.parametrize("family", [FAMILIES[0], *map(slow, FAMILIES[1:-1]), FAMILIES[-1]])
def test_every_draft_of_a_right_layer_is_accepted_greedy_and_sampled(tmp_path: Path, family: str) -> None:
    engine = engine_of(checkpoints.planted(family, tmp_path).folder)
    for law in ({}, {"temperature": 0.8, "seed": 3}):
        kept, drafted = accepted(engine, **law)
        assert kept == drafted > 50


def test_no_draft_of_a_wrong_layer_is_accepted(tmp_path: Path) -> None:
    kept, drafted = accepted(engine_of(checkpoints.planted("deepseek-v3", tmp_path, wrong=True).folder))
    assert drafted > 50
    assert kept == 0


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_checkpoint_without_such_layers(tmp_path: Path) -> None:
    saved = checkpoints.save("deepseek-v3", tmp_path)
    checkpoints.change(saved.folder, {}, without="layers.2.")
    with pytest.raises(ModelError, match=r"has no MTP layers among its tensors \(num_nextn_predict_layers .* is 1\)"):
        engine_of(saved.folder)


def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    zoo.reference("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a llama model, whose MTP layers are not known"):
        engine_of(str(tmp_path))


def test_layers_that_are_not_whole(tmp_path: Path) -> None:
    def refused(match: str, changed: dict[str, Tensor], without: str = "", family: str = "deepseek-v3") -> None:
        saved = checkpoints.save(family, tmp_path)
        checkpoints.change(saved.folder, changed, without=without)
        with pytest.raises(ModelError, match=match):
            engine_of(saved.folder)

    refused(r"hnorm\.weight is missing", {}, "layers.2.hnorm")
    refused(r"lacks 1 of its weights, model\.norm\.weight among them", {}, "layers.2.shared_head.norm")
    refused(r"\(MTP layer\)': .*issues during automatic conversion of the weights", {}, "layers.2.mlp.experts.1.up")
    square = torch.zeros(32, 32)
    refused(r"eh_proj\.weight is \(32, 32\), expected \(32, 64\)", {"model.layers.2.eh_proj.weight": square})
    refused(r"o_proj\.weight is of shape \[32, 8\]", {"model.layers.2.self_attn.o_proj.weight": torch.zeros(32, 8)})
    refused(r"has model\.layers\.0\.extra\.weight in its MTP layer, which is not known",
            {"model.layers.2.extra.weight": torch.zeros(2)})  # fmt: skip
    refused(r"has model\.layers\.0\.other\.weight in its MTP layer", {"mtp.other.weight": torch.zeros(2)},
            family="qwen-3.5")  # fmt: skip


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a GGUF file, whose MTP layers are not read"):
        load_mtp(str(file), None, zoo.reference("qwen-3.5"))


# -------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("sharded", [True, False])
def test_the_log_says_that_there_are_such_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sharded: bool
) -> None:
    saved = checkpoints.save("qwen-3.5", tmp_path, sharded=sharded)
    with caplog.at_level(logging.INFO, "engine.proposers.heads.mtp"):
        engine_of(saved.folder, mtp=False, proposer="ngram")
    assert f"{saved.folder!r} has layers for multi-token prediction; with the option mtp they draft" in caplog.text
    zoo.reference("qwen-3.5").save_pretrained(tmp_path / "without")
    caplog.clear()
    with caplog.at_level(logging.INFO, "engine.proposers.heads.mtp"):
        engine_of(str(tmp_path / "without"), mtp=False, proposer="ngram")
    assert "multi-token" not in caplog.text


def test_names_inside_of_a_model_that_also_sees() -> None:
    config = zoo.further_families()["glm-4-moe"]
    config.part_of = "a model that also sees"
    finder = MTPFinder.of(config)
    assert finder is not None
    assert finder.wants("model.language_model.layers.2.enorm.weight")
    assert not finder.wants("model.language_model.layers.1.input_layernorm.weight")
    found, layers = finder.first_layer({"model.language_model.layers.2.enorm.weight": torch.zeros(1)})
    assert (list(found), layers) == (["enorm.weight"], 1)
    assert finder.of_target({"model.language_model.embed_tokens.weight": torch.zeros(1)}).keys() == {
        "model.embed_tokens.weight"
    }
