"""Whether rounds, plain steps and transformers give the same tokens on this device: small models, three families.

In float32, rounds with and without drafts are compared with plain decoding of each request alone, and greedy requests
also with transformers. In bfloat16, equality is promised only with `reproducible`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.cuda.engines import on_kernels, record
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.harness.bare import options
from pilotfish.engine.device_loop.loop import RoundLoop
from pilotfish.engine.engine import Engine
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import Request

NUM_DRAFT = 3
_LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
    SamplingParams(temperature=1.0),
)
_LENGTHS = (1, 5, 17, 33, 2, 40, 9, 26)  # tokens of each prompt
_LONGEST, _PAGE = 96, 16


class Different(Exception):
    """Unexpected: tokens differ from those of plain decoding."""


TokensByRequest = Mapping[str, tuple[int, ...]]  # tokens by request


@dataclass(frozen=True, slots=True)
class Models:
    """The model of transformers, the same in our decoder, and a draft that is often right."""

    reference: PreTrainedModel
    target: PreTrainedModel
    draft: PreTrainedModel

    @classmethod
    def of(cls, config: PreTrainedConfig, device: str, dtype: torch.dtype) -> Models:
        """Create random weights, large enough for attention to matter; the same on every machine."""
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn_like(parameter) * 1.4 * parameter.shape[-1] ** -0.5)
        made: list[Any] = [reference, _disturbed(reference, 0.0), _disturbed(reference, 0.02)]
        placed, *others = (model.to(device=device, dtype=dtype) for model in made)
        return cls(placed, *map(on_kernels, others))


def families() -> dict[str, PreTrainedConfig]:
    """Return configs with grouped heads, with q and k norms, and with windows, softcaps and norms after parts."""
    common: dict[str, Any] = {
        "vocab_size": 331, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None,
        "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return {
        "llama": LlamaConfig(**common),
        "qwen3": Qwen3Config(**common),
        "gemma2": Gemma2Config(**common, sliding_window=9, query_pre_attn_scalar=64),
    }


def compare(setting: Setting, section: PartReport) -> None:
    """Compare all families; raise Different at the end if any token differs."""
    section.say(f"{setting.requests} requests of {setting.output} tokens, greedy and sampled, with cuts and without.")
    section.table("family", "type", "what", "against", "requests alike", "drafts kept")
    wrong = list[str]()
    for family, config in list(families().items())[: None if setting.is_cuda else 1]:
        for dtype, compared in ((torch.float32, _in_float32), (torch.bfloat16, _reproducible)):
            models = Models.of(config, setting.device, dtype)
            for what, against, got, want, kept in compared(models, setting):
                alike = sum(got[name] == tokens for name, tokens in want.items())
                name = str(dtype).removeprefix("torch.")
                section.row(family, name, what, against, f"{alike} of {len(want)}", kept)
                section.number(f"{family} {name} {what} {against}", alike=alike, of=len(want), kept=kept)
                wrong += [] if alike == len(want) else [f"{family} {name}, {what} against {against}"]
    if wrong:
        raise Different("; ".join(wrong))


Line = tuple[str, str, TokensByRequest, TokensByRequest, int]  # what, against what, the tokens of both, accepted drafts


def _in_float32(models: Models, setting: Setting) -> list[Line]:
    alone = _alone(models, setting, dtype="float32")
    together, kept = _together(models, setting, NUM_DRAFT, dtype="float32", loop="rounds")
    without, _ = _together(models, setting, 0, dtype="float32", loop="rounds")
    return [
        (f"rounds, {NUM_DRAFT} drafts, in company", "plain steps alone", together, alone, kept),
        ("rounds without drafts, in company", "plain steps alone", without, alone, 0),
        ("plain steps alone", "transformers, greedy", alone, _greedy(models.reference, setting), 0),
    ]


def _reproducible(models: Models, setting: Setting) -> list[Line]:
    """Compare with fixed-shape passes, in which neither the batch nor drafts change a bit."""
    how = {"dtype": "bfloat16", "reproducible": True}
    alone = _alone(models, setting, **how)
    together, kept = _together(models, setting, NUM_DRAFT, **how)
    return [(f"reproducible, {NUM_DRAFT} drafts, in company", "plain steps alone", together, alone, kept)]


def _alone(models: Models, setting: Setting, **how: Any) -> TokensByRequest:
    said: dict[str, tuple[int, ...]] = {}
    engine = _engine(models, setting, **how, loop="plain", prefix_cache=False)
    for request in _requests(setting, models.target.config.vocab_size, 0):
        said |= run(engine, [request])[0]
    return said


def _together(models: Models, setting: Setting, num_draft: int, **how: Any) -> tuple[TokensByRequest, int]:
    engine = _engine(models, setting, **how)
    said = run(engine, _requests(setting, models.target.config.vocab_size, num_draft))
    if setting.is_cuda and isinstance(engine.rounds, RoundLoop):
        assert not engine.rounds.graphs.unrecorded, "not every round was a graph"
    assert engine.rounds.name == how.get("loop", engine.rounds.name), (
        "a round failed, and the rest were plain steps: see the log"
    )
    return said


def _engine(models: Models, setting: Setting, **how: Any) -> Engine:
    """Return an engine with pages for all, and chunks so small that prompts are fed while others decode."""
    pages = len(_LENGTHS) * -(-_LONGEST // _PAGE)
    both = sum(layout_of_model(model).bytes_per_token for model in (models.target, models.draft))
    config = options(
        "random", draft=("near",), device=setting.device, proposer="model", num_draft_tokens=NUM_DRAFT,
        max_batch_size=len(_LENGTHS), max_batch_tokens=32, max_model_len=_LONGEST, page_size=_PAGE,
        kv_memory=(pages * _PAGE * both + 1) / 2**30, **how,
    )  # fmt: skip
    engine = assemble(config, models.target, models.draft)
    record(engine, len(_LENGTHS))  # on CUDA as graphs, which stand in for those of fewer sequences
    return engine


def _requests(setting: Setting, vocab: int, num_draft: int) -> list[Request]:
    mode = SpeculationMode.FIXED if num_draft else SpeculationMode.OFF
    wishes = SpeculationParams(mode=mode, num_draft_tokens=num_draft)
    samplers = [
        replace(_LAWS[i % len(_LAWS)], max_tokens=setting.output, seed=i, ignore_eos=True)
        for i in range(setting.requests)
    ]
    return [
        Request(request_id=str(i), token_ids=prompt, sampling=law, speculation=wishes)
        for i, (prompt, law) in enumerate(zip(_prompts(vocab), samplers, strict=False))
    ]


def _prompts(vocab: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(vocab, (length,), generator=generator).tolist()) for length in _LENGTHS]


def run(engine: Engine, requests: Seq[Request]) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the tokens of each request, and the total number of accepted drafts."""
    said, kept = {request.request_id: tuple[int, ...]() for request in requests}, 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step().events:
            said[event.request_id] += tuple(event.token_ids)
            kept += event.finished.stats.accepted if event.finished is not None else 0
    return said, kept


def _greedy(model: PreTrainedModel, setting: Setting) -> TokensByRequest:
    """Return the tokens of every greedy request from transformers' own loop."""
    said: dict[str, tuple[int, ...]] = {}
    for i, prompt in enumerate(_prompts(model.config.vocab_size)[: setting.requests]):
        if _LAWS[i % len(_LAWS)].temperature == 0:
            ids = torch.tensor([prompt], device=setting.device)
            looped: Any = model
            found = looped.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=setting.output, do_sample=False, pad_token_id=0
            )
            said[str(i)] = tuple(found[0, len(prompt) :].tolist())
    return said


def _disturbed(model: PreTrainedModel, amount: float) -> PreTrainedModel:
    """Return the model with slightly perturbed weights."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * amount * parameter.shape[-1] ** -0.5)
    return twin
