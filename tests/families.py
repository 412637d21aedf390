"""A saved family: its folder, a near draft beside it, ragged prompts, and what transformers makes of them.

Half of what is asked for is greedy. The other half is sampled: there transformers gives the logits, and the sampler's
law and noise choose among them, so that the oracle knows no batch, no arena and no draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedConfig, PreTrainedModel

from pilotfish.engine.params import (
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationSettings,
    Verification,
)
from pilotfish.engine.sampling.distribution import draw_rows
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from pilotfish.engine.sampling.processors import process
from pilotfish.engine.types import Request, Sequence
from tests import zoo

NEW_TOKENS = 20
PROPOSERS = ("none", "ngram", "suffix", "model", "self")
MOST_DRAFTS = 8
# Of the sampled half, one for each prompt.
LAWS = (
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "seed": 1},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.2, "seed": 2},
    {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 0.3, "seed": 3},
    {"temperature": 1.0, "seed": 2**64 - 1},
)


@dataclass(frozen=True)
class Case:
    """A prompt, what is asked for, and the tokens that come."""

    prompt: list[int]
    asked: dict[str, float]  # fields of `SamplingParams`; none for the greedy half
    expected: list[int]


@dataclass(frozen=True)
class Saved:
    """Two checkpoints and the oracle."""

    target: str
    draft: str
    cases: list[Case]
    proposers: tuple[str, ...]  # those that the target can have
    new_tokens: int = NEW_TOKENS

    @property
    def drafts(self) -> tuple[str, ...]:
        """The option `draft`."""
        return (self.draft, "self:1") if "self" in self.proposers else (self.draft,)

    def case(self, name: str) -> Case:
        """The case of a request that `requests` has made, by its name."""
        return self.cases[int(name.split(maxsplit=1)[0])]


def save(family: str, folder: Path, new_tokens: int = NEW_TOKENS, **how: object) -> Saved:
    """Write the family's model and a near draft of it as checkpoints."""
    model = zoo.reference(family)
    model.save_pretrained(folder / "target", **how)
    zoo.disturbed(model).save_pretrained(folder / "draft", **how)
    cases = cases_of(model, new_tokens)
    return Saved(str(folder / "target"), str(folder / "draft"), cases, proposers_of(model.config), new_tokens)


def cases_of(model: PreTrainedModel, new_tokens: int = NEW_TOKENS) -> list[Case]:
    """Some prompts of unequal lengths greedily, then the same ones sampled."""
    prompts = zoo.prompts(len(LAWS))
    greedy = [Case(prompt, {}, generate(model, prompt, new_tokens)) for prompt in prompts]
    sampled = [Case(p, law, sample(model, p, law, new_tokens)) for p, law in zip(prompts, LAWS, strict=True)]
    return greedy + sampled


def proposers_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """One layer has no earlier ones, and what runs one sequence at a time has no such draft."""
    has_layers = config.num_hidden_layers > 1 and config.model_type not in ("falcon", "qwen4_exp_text")
    return PROPOSERS if has_layers else PROPOSERS[:-1]


def requests(saved: Saved, proposers: Iterable[str]) -> list[Request]:
    """Every second case with each proposer, the others with the next one, from 0 to 8 drafts by turns.

    A name begins with the number of its case. Targets without `self` mostly run one sequence at a time, which takes
    long: they get every third request.
    """
    made = list[Request]()
    for proposer in proposers:
        for number, case in enumerate(saved.cases):
            num_draft = len(made) % (MOST_DRAFTS + 1)
            params = SamplingParams(max_tokens=saved.new_tokens, **case.asked)
            drafts = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=num_draft, proposer=proposer)
            name = f"{number} {proposer} K={num_draft}"
            made.append(Request(request_id=name, token_ids=tuple(case.prompt), sampling=params, speculation=drafts))
    if "self" not in saved.proposers:
        return made[::3]
    return [request for i, request in enumerate(made) if (i + i // len(saved.cases)) % 2 == 0]


def assert_expected(saved: Saved, tokens: dict[str, list[int]]) -> None:
    """The tokens of `requests`, by their names."""
    assert tokens == {name: saved.case(name).expected for name in tokens}


def generate(model: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS, **more: object) -> list[int]:
    """Greedy, by transformers, alone; the prompt's tokens left out."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0, **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def sample(model: PreTrainedModel, prompt: list[int], law: dict[str, float], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Sampled under `law`, by our sampler from transformers' logits, alone."""
    params = SamplingParams(max_tokens=new_tokens, **law)
    sampler = _Sampler(Request(request_id="r", token_ids=tuple(prompt), sampling=params))
    return generate(model, prompt, new_tokens, logits_processor=[sampler])


class _Sampler(LogitsProcessor):
    """Leaves one token possible: the one that the coupled rule draws."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` `[1, vocab]` of the token after `input_ids` `[1, length]`."""
        settings = SpeculationSettings(
            mode=SpeculationMode.OFF, num_draft_tokens=0, proposer="none", verification=Verification.COUPLED
        )
        tokens, seed = input_ids[0].tolist(), self._request.sampling.seed or 0
        sequence = Sequence(self._request, seed, settings, len(tokens) + 1, frozenset({zoo.END}), tokens)
        row = LogitsRow(sequence, (), Stream.COUPLED)
        chosen = draw_rows(process(scores.float(), [row]), [row]).token
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)
