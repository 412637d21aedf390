"""The target as its own draft: against an independent reading of the paper, and with adapters that are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import InvalidRequest, ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.proposers.chain import Chain
from pilotfish.engine.proposers.heads import uno
from pilotfish.engine.proposers.heads.uno import UnoProposer, adapter_folder
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Adapter, Request
from pilotfish.engine.types import Sequence as Output
from tests import adapters, fakes, heads, zoo
from tests.covering import some

ATTENDING = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "llama-tied": ["q_proj", "v_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "v_proj", "fc1", "fc2"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    "mistral": ["k_proj", "up_proj"],  # a window of 9
    "gemma2": ["q_proj", "o_proj"],  # softcaps, a window in every other layer
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt-oss": ["q_proj", "v_proj"],  # sinks
    "deepseek-v3": ["q_a_proj", "o_proj"],  # keys and values stay latent
    "deepseek-v2": ["kv_b_proj"],  # they are expanded: the adapter changes what expands them
    # The last layers read the keys and values of earlier ones; some keys are values.
    "gemma-4": ["q_proj", "k_proj", "o_proj", "per_layer_projection"],
}  # fmt: skip


# ------------------------------------------------------------------------- the paper, without a cache and without us


@torch.no_grad()
def spoken(model: PreTrainedModel, text: list[int], noise: list[int], folder: Path, own: Path | None) -> Tensor:
    """Logits `[1 + len(noise), vocab]` of the last token of `text` and of the noise behind it; plain transformers.

    Rows of the text have the adapter `own`, if any, and rows of noise that of `folder`.
    """
    is_noise = torch.tensor([False] * len(text) + [True] * len(noise))
    with gated(model, folder, is_noise), gated(model, own, ~is_noise):
        logits: Tensor = model(torch.tensor([[*text, *noise]]), use_cache=False).logits[0]
    return logits[len(text) - 1 :]


@contextmanager
def gated(model: PreTrainedModel, folder: Path | None, where: Tensor) -> Iterator[None]:
    """Within it the rows `where` of the one text have the adapter in `folder`, W x + scale * B (A x)."""
    if folder is None:
        yield
        return
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    tensors, hooks = load_file(folder / "adapter_model.safetensors"), []
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")] * (config["lora_alpha"] / config["r"])
            hooks.append(model.get_submodule(path).register_forward_hook(partial(_add, where, a, b)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(where: Tensor, a: Tensor, b: Tensor, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + where[:, None] * (inputs[0] @ a.t() @ b.t())


@dataclass
class Watched(Proposer):
    """The proposer, with what it was asked, what it fed the target, and what it said."""

    inner: UnoProposer
    feeds: list[list[Feed]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    asked: list[list[tuple[Output, list[int], int]]] = field(default_factory=list)
    said: list[tuple[list[Work], list[Forward]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner, self.inner._target = self.inner._target, self
        self.vocab_size = self.runner.vocab_size

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        self.feeds.append(list(feeds))
        self.logits.append(self.runner.forward(feeds))
        return self.logits[-1]

    def propose(self, works: Sequence[Work], forwards: list[Forward]) -> list[Work]:
        self.asked.append([(w.sequence, list(w.sequence.tokens), w.num_draft) for w in works])
        made = self.inner.propose(works, forwards)
        self.said.append((made, forwards))
        return made


def served(model: PreTrainedModel, folder: Path, prepare: Any = zoo.ours, **config: Any) -> tuple[Engine, Watched]:
    watched: list[Watched] = []

    def watch(inner: Any) -> Watched:
        watched.append(Watched(inner))
        return watched[0]

    usual = {"target": "t", "draft": str(folder), "proposer": "uno", "speculation": "fixed"}
    settings = EngineConfig(**usual | {"max_batch_size": 8, "page_size": 4} | config)
    engine = heads.assembled(settings, prepare(model), wrappers={"uno": watch})
    return engine, watched[0]


def drafting(count: int, num_draft: int | None = None) -> list[Request]:
    """Requests with K of 1, 2, 3, ... unless it is given."""
    ks = [num_draft or i + 1 for i in range(count)]
    return fakes.requests(zoo.prompts(count), ks, max_tokens=9, ignore_eos=True)


def in_c(model: PreTrainedModel) -> PreTrainedModel:
    return zoo.as_served(zoo.ours(model))


IN_C = ("llama-tied", "gpt2", "qwen3", "gpt-oss", "deepseek-v3", "gemma-4")  # the others run in torch


@pytest.mark.parametrize("family", some(ATTENDING, ["llama", "llama-tied", "mixtral", "deepseek-v2"]))
def test_drafts_are_those_of_the_paper(tmp_path: Path, family: str) -> None:
    """Five requests in a batch, one with an adapter of its own; every logit of every pass that drafts."""
    model, targets = zoo.reference(family), ATTENDING[family]
    folder = adapters.write(tmp_path / "uno", model, 4, 4.0, targets)
    other = adapters.write(tmp_path / "other", model, 3, 3.0, [t for t in targets if t != "kv_b_proj"] or ["o_proj"])
    prepare = in_c if family in IN_C else partial(zoo.decoder, packs=False, expands="kv_b_proj" in targets)
    engine, watched = served(model, folder, prepare, adapter={"other": str(other)})
    wanted = drafting(5)
    wanted[1] = replace(wanted[1], adapter="other")
    outputs = fakes.run(engine, wanted)
    assert watched.said
    for asked, feeds, logits, (made, forwards) in zip(
        watched.asked, watched.feeds, watched.logits, watched.said, strict=True
    ):
        parts, first = iter(feeds), 0
        for (sequence, text, k), work in zip(asked, made, strict=True):
            newest = next(parts)
            noise = next(parts) if k > 1 else None
            own = None if sequence.adapter is None else other
            want = spoken(model, text, [] if noise is None else list(noise.tokens), folder, own)
            _same(logits[first : first + k], want)
            assert work.drafts == tuple(want.argmax(-1).tolist()), "greedy"
            assert (list(newest.tokens), newest.start) == (text[-1:], len(text) - 1)
            assert noise is None or (noise.start, len(noise.tokens)) == (len(text), k - 1)
            first += k
        assert forwards == [Forward("draft", len(asked), first)]
    firsts = [f.stats.accepted_per_position[0] / f.stats.rounds for f in outputs.finished.values()]
    assert firsts == [1.0] * 5, "the first draft is the target's own next token"


def _same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-3 * float(want.std()), rtol=1e-3)


# -------------------------------------------------------------------------------------------------------- the noise


def noise_of(*asked: tuple[int, int, int], ids: range = range(1, 97)) -> list[list[int]]:
    """What stands behind sequences, each with its seed, length and K."""
    proposer = UnoProposer(fakes.TableModel(fakes.hashed_law(97), 97, 64, 16), Adapter("uno", 1, ""), ids)
    chains = [Chain(fakes.sequence([3] * length, seed=seed), k) for seed, length, k in asked]
    return proposer._draw_noise(chains)


def test_noise_hangs_on_seed_and_position_alone() -> None:
    [long] = noise_of((7, 10, 9))
    assert len(long) == 8
    assert noise_of((7, 10, 4)) == [long[:3]], "not on K"
    assert noise_of((7, 12, 7)) == [long[2:]], "on the position, not on where the noise begins"
    assert noise_of((8, 10, 9)) != [long]
    assert noise_of((1, 5, 3), (7, 10, 9), (2**64 - 1, 4, 1)) == [*noise_of((1, 5, 3)), long, []], "not on others"
    assert noise_of((2**64 - 1, 10, 9)) != noise_of((0, 10, 9))


def test_noise_is_uniform_over_its_ids() -> None:
    drawn = [t for ids in noise_of(*((seed, 5, 9) for seed in range(300)), ids=range(3, 13)) for t in ids]
    counts = torch.bincount(torch.tensor(drawn), minlength=13)
    assert not counts[:3].any()
    assert len(counts) == 13
    expected = len(drawn) / 10
    assert float(((counts[3:] - expected) ** 2 / expected).sum()) < 27.9, "chi-square of 9 degrees, one in a thousand"


def test_noise_is_drawn_below_the_mask_token_of_the_config(tmp_path: Path) -> None:
    model = zoo.reference("llama")
    folder = adapters.write(tmp_path / "a", model, 2, 2.0, ["q_proj"])
    for mask, largest in ((None, zoo.VOCAB - 1), (5, 4)):
        target = zoo.ours(model)
        target.config.mask_token_id = mask
        engine, watched = served(model, folder, lambda _, target=target: target)
        fakes.run(engine, drafting(6, 8))
        seen = {t for feeds in watched.feeds for f in feeds if f.adapter for t in f.tokens}
        assert seen <= set(range(1, largest + 1))
        assert len(seen) > 3
    for mask in (1, zoo.VOCAB + 1, "x"):
        target.config.mask_token_id = mask
        with pytest.raises(ModelError, match=f"mask_token_id of the target is {mask!r}; expected 2 to 97"):
            uno.load_uno(str(folder), None, target)


# ------------------------------------------------------------------------------------------------ files and refusals


def test_only_the_adapter_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a repository may hold the base model too, of many gigabytes; the adapter may lie in a folder of it."""
    asked: list[Any] = []
    written = adapters.write(tmp_path / "adapter", zoo.reference("llama"), 2, 2.0, ["q_proj"])
    assert adapter_folder(str(tmp_path), None) == written == adapter_folder(str(written), None)

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert adapter_folder("someone/uno", "1234") == written
    files = [f"{folder}adapter_{kind}" for folder in ("", "adapter/") for kind in ("config.json", "model.safetensors")]
    assert asked == [("someone/uno", "1234", sorted(files))]


def test_no_request_can_name_the_adapter(tmp_path: Path) -> None:
    folder = adapters.write(tmp_path, zoo.reference("llama"), 2, 2.0, ["q_proj"])
    engine, _ = served(zoo.reference("llama"), folder)
    assert not engine.adapters
    with pytest.raises(InvalidRequest, match=r"adapter is 'uno'; none is loaded"):
        engine.check(Request(request_id="r", token_ids=(3,), adapter="uno"))


def test_an_adapter_that_is_not_served_is_refused(tmp_path: Path) -> None:
    model = zoo.reference("llama")
    folder = adapters.write(tmp_path / "dora", model, 2, 2.0, ["q_proj"], use_dora=True)
    with pytest.raises(ModelError, match="adapter 'uno': use_dora is True"):
        served(model, folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ModelError,
        match=r"draft '.*empty' is not a GGUF file and has neither config.json nor adapter_config.json",
    ):
        served(model, tmp_path / "empty")


def test_targets_that_cannot_draft_for_themselves_are_refused(tmp_path: Path) -> None:
    target = zoo.ours(zoo.reference("granite-4"))
    with pytest.raises(ModelError, match=f"uno: {type(target).__name__} has recurrent layers"):
        uno.load_uno(str(tmp_path), None, target)
    folder = adapters.write(tmp_path, zoo.reference("falcon"), 2, 2.0, ["query_key_value"])
    with pytest.raises(ModelError, match=r"draft .* is not supported for .*: falcon is not in the table"):
        served(zoo.reference("falcon"), folder)


def test_a_pass_that_fails_costs_drafts_alone(tmp_path: Path) -> None:
    """Noise may have been written by then: the next pass of the target overwrites it."""
    model = zoo.reference("llama")
    folder = adapters.write(tmp_path, model, 4, 8.0, ATTENDING["llama"])
    plain = assemble(EngineConfig(target="t", proposer="none"), zoo.ours(model))
    want = fakes.run(plain, drafting(4)).tokens
    engine, watched = served(model, folder)
    run = watched.runner.forward

    def failing(feeds: Sequence[Feed]) -> Tensor:
        made = run(feeds)
        if len(watched.feeds) % 2:
            raise RuntimeError("the pass failed")
        return made

    watched.runner = SimpleNamespace(forward=failing)
    outputs = fakes.run(engine, drafting(4, 4), failures=3)
    assert outputs.tokens == want
    assert any(done.stats.accepted for done in outputs.finished.values()), "of the passes between"
