"""One prompt alone, one token at a time, is the law; here is what compares all else with it.

A random target that speaks the embedded tokenizer's tokens, and every proposer that there is: a draft model that is
often right, the same with its ids shuffled and some missing, the target's first layer, random heads and adapters, and
two that are always right and always wrong.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.llm import LLM, CompletionOutput, _Output
from pilotfish.engine.model.fallback import load_model
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.proposers.heads import load_heads
from pilotfish.engine.proposers.sources import draft_sources
from pilotfish.engine.proposers.vocab import VocabMap
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import Logprob, Request, Sequence
from pilotfish.models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import adapters, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints, mtp_checkpoints
from tests.scripted import ScriptedProposer

PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef add(a",
    "import os\nimport sys\n",
    "x",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
)
# What is tried in an engine of its own, and the proposer that a request names there.
OWN = {"mapped": "model", "eagle3": "eagle", "mtp": "mtp", "dflash": "dflash", "uno": "uno"}
SHARED = ("none", "ngram", "suffix", "model", "self", "medusa", "eagle", "auto", "right", "wrong")
PROPOSERS = (*SHARED[:4], "mapped", *SHARED[4:7], *list(OWN)[1:], *SHARED[7:])
VOCAB, NEWLINE = 2048, 199
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Pair:
    """A target with all that drafts for it. It remembers what plain decoding said, for `right` and `wrong`."""

    target: nn.Module
    draft: nn.Module
    respelled: tuple[nn.Module, VocabMap]  # the same draft of another vocabulary
    parts: Mapping[str, object]  # of the config: the heads' folders and how many layers `self` has
    own: Mapping[str, Mapping[str, object]]  # the same of heads that are tried in an engine of their own
    _known: dict[tuple[object, ...], list[CompletionOutput]] = field(default_factory=dict)
    _futures: dict[tuple[object, ...], list[int]] = field(default_factory=dict)
    _engines: dict[str, LLM] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        target: nn.Module,
        draft: nn.Module,
        parts: Mapping[str, object],
        own: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        prepare: Callable[[nn.Module], nn.Module] = zoo.as_served,
    ) -> Pair:
        """`prepare` makes of each model what is run."""
        other, vocab = respelled(draft)  # while it has weights: what is packed has none
        return cls(prepare(target), prepare(draft), (prepare(other), vocab), parts, own)

    def plain(self, prompt: str, sampling: SamplingParams) -> list[CompletionOutput]:
        """One prompt alone, no drafts, no cache, pages to spare."""
        key = (prompt, repr(sampling))
        if key not in self._known:
            config = EngineConfig(target="target", proposer="none", prefix_cache=False)
            alone = self._kept("plain", lambda: assemble(config, self.target))
            self._known[key] = alone.generate(prompt, sampling)
            for done in self._known[key]:
                self._futures[self._key(codec().encode(prompt), done.seed, sampling)] = list(done.token_ids)
        return self._known[key]

    def llm(self, proposer: str, pages: int | None = None, **options: object) -> LLM:
        """The proposers of `SHARED` in one engine, each of `OWN` in another; each engine is made once."""
        usual = {"num_draft_tokens": 8, "page_size": 4, "max_batch_size": 16, "max_batch_tokens": 64}
        parts = {"target": "target", **self.own.get(proposer, self.parts)}
        config = EngineConfig(**{**usual, **parts, **options})
        drafts = () if proposer in self.own else (self.draft,)
        if pages is not None:
            config = config.model_copy(update={"kv_memory": self._gib(config, pages, *drafts)})
        name = f"{proposer == 'mapped'} {config!r}"
        if proposer in self.own:
            return self._kept(name, lambda: heads.assembled(config, self.target))
        if proposer != "mapped":
            scripted = {"right": ScriptedProposer(self._right), "wrong": ScriptedProposer(self._wrong)}
            return self._kept(name, lambda: heads.assembled(config, self.target, self.draft, extra_proposers=scripted))
        draft, vocab = self.respelled
        return self._kept(name, lambda: heads.assembled(config, self.target, draft, vocab=vocab))

    def _gib(self, config: EngineConfig, pages: int, *drafts: nn.Module) -> float:
        """The memory of as many pages of 4 tokens, in all arenas together."""
        each = [layout_of_model(m) for m in (self.target, *drafts)]
        sources = draft_sources(config)
        each += [h.layout for h in load_heads(sources, config, self.target).values() if h.layout is not None]
        if "self" in sources:
            each.append(replace(each[0], layers=each[0].layers[: sources["self"].layers]))
        return (pages * 4 * sum(layout.bytes_per_token for layout in each) + 1) / 2**30

    def _kept(self, name: str, make: Callable[[], Engine]) -> LLM:
        if name not in self._engines:
            self._engines[name] = LLM.of(make(), codec())
        return self._engines[name]

    def _right(self, sequence: Sequence, k: int) -> list[int]:
        request, done = sequence.request, sequence.num_generated
        return self._futures.get(self._key(request.token_ids, sequence.seed, request.sampling), [])[done : done + k]

    def _wrong(self, sequence: Sequence, k: int) -> list[int]:
        return [(token + 1) % VOCAB for token in self._right(sequence, k)]

    @staticmethod
    def _key(prompt: Seq[int], seed: int, sampling: SamplingParams) -> tuple[object, ...]:
        return tuple(prompt), seed, repr(sampling)


@cache
def codec() -> Codec:
    return Codec.load(embedded_target())


@cache
def random_pair(*, as_served: bool = True) -> Pair:
    """A small target, quick to run, and a draft that is often right; its heads hardly ever are.

    `as_served`: its layers in our C, where that multiplies here. Rounds on the device need them in torch.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=128, bos_token_id=1, eos_token_id=0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    folder = Path(tempfile.mkdtemp())
    both = heads.medusa(folder, vocab=VOCAB), heads.eagle(folder, vocab=VOCAB)
    parts = {"draft": ("self:1", *both), "max_model_len": 128}
    reduced = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 512, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    eagle3 = {"draft": heads.eagle3(folder, reduced), "max_model_len": 128}
    return Pair.of(
        zoo.ours(model),
        zoo.near(model, 0.01),
        parts,
        {"eagle3": eagle3, **in_blocks(model, folder)},
        zoo.as_served if as_served else lambda model: model,
    )


@cache
def embedded_pair() -> Pair:
    """The embedded target with its trained draft and heads."""
    target, draft = (
        load_model(str(path), None, torch.float32, torch.device("cpu"))
        for path in (embedded_target(), embedded_draft())
    )
    medusa, eagle = str(embedded_medusa()), str(embedded_eagle())
    parts = {"draft": ("self:3", medusa, eagle), "max_model_len": 128}
    own = {"eagle3": {"draft": eagle, "max_model_len": 128}, **in_blocks(target, Path(tempfile.mkdtemp()), NEWLINE)}
    return Pair.of(target, draft, parts, own)


@cache
def mtp_pair(*, as_served: bool = True) -> Pair:
    """A small mixture of experts with a multi-token prediction layer in its checkpoint, which is right now and then."""
    folder = Path(tempfile.mkdtemp())
    saved = mtp_checkpoints.planted("glm-4-moe", folder, noise=0.3, vocab=VOCAB)
    own = {"mtp": {"target": str(folder), "draft": "mtp", "max_model_len": 128}}
    prepare = zoo.as_served if as_served else lambda model: model
    return Pair.of(zoo.ours(saved.target), zoo.near(saved.target, 0.01), {}, own, prepare)


def in_blocks(target: PreTrainedModel, folder: Path, says: int | None = None) -> dict[str, dict[str, object]]:
    """What drafts a block in one pass: a draft of DFlash, random or always one token, and a random adapter (Uno)."""
    config, hidden = target.config, target.config.hidden_size
    dflash = dflash_checkpoints.sized(folder, hidden, VOCAB, config.num_hidden_layers, says=says)
    uno = adapters.write(folder / "uno", target, 4, 4.0, ["q_proj", "v_proj", "down_proj"])
    return {"dflash": {"draft": dflash, "max_model_len": 128}, "uno": {"draft": str(uno), "max_model_len": 128}}


def random_of(proposer: str, *, as_served: bool = True) -> Pair:
    """`random_pair`, or the pair that has what this proposer needs."""
    return (mtp_pair if proposer == "mtp" else random_pair)(as_served=as_served)


def embedded_of(proposer: str) -> Pair:
    """`embedded_pair`, or the pair that has what this proposer needs."""
    return mtp_pair() if proposer == "mtp" else embedded_pair()


def respelled(draft: nn.Module) -> tuple[nn.Module, VocabMap]:
    """The same draft with its ids shuffled, and one in nine of the target's tokens unknown to it."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
    other = copy.deepcopy(draft)
    with torch.no_grad():
        weights = {id(w): w for w in (other.get_input_embeddings().weight, other.get_output_embeddings().weight)}
        for weight in weights.values():  # one, where they are tied
            weight[order] = weight.clone()
    ids = tuple(order.tolist())
    return other, VocabMap(ids, tuple(-1 if i % 9 == 8 else ids[i] for i in range(VOCAB)), VOCAB, VOCAB)


def run(llm: LLM, requests: Seq[Request], *, preempts: bool = False) -> list[list[CompletionOutput]]:
    """The outputs of each of some requests that need not agree in anything, all in one ragged batch.

    `preempts`: pages must have been too few, else nothing was shown.
    """
    outputs = {(r.request_id, i): _Output(r, i, llm._text(r)) for r in requests for i in range(r.sampling.n)}
    preempted = 0
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        step = llm.engine.step()
        preempted += step.stats.preempted
        for event in step.events:
            outputs[event.request_id, event.index].take(event, llm.engine)
    assert preempted or not preempts, "pages were to spare"
    return [[outputs[r.request_id, i].completion() for i in range(r.sampling.n)] for r in requests]


def assert_speculation_changes_nothing(
    pair: Pair, engine: LLM, sampling: SamplingParams, proposer: str, num_draft: int, prompts: Seq[str] = PROMPTS
) -> list[CompletionOutput]:
    want = [done for prompt in prompts for done in pair.plain(prompt, sampling)]
    got = engine.generate(list(prompts), sampling, speculation=asking(proposer, num_draft))
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    engine.engine.check_invariants()
    return got


def asking(proposer: str, num_draft: int) -> SpeculationParams:
    name = OWN.get(proposer, proposer)
    return SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=num_draft, proposer=name)


def assert_same(got: CompletionOutput, want: CompletionOutput) -> None:
    for name in ("index", "token_ids", "text", "finish_reason", "matched_stop", "prompt_tokens", "seed", "error"):
        assert getattr(got, name) == getattr(want, name), name
    assert_close(got.logprobs, want.logprobs, len(want.token_ids))
    assert_close(got.prompt_logprobs, want.prompt_logprobs, want.prompt_tokens)


def assert_close(got: Seq[Logprob | None] | None, want: Seq[Logprob | None] | None, length: int) -> None:
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert len(got) == len(want) == length
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            numbers = [ours.logprob, *(c.logprob for c in ours.top)]
            assert numbers == pytest.approx([theirs.logprob, *(c.logprob for c in theirs.top)], abs=1e-4)
