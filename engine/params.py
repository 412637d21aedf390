"""The parameters of a request: sampling, structure, speculation. `request/validation.py` checks the values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # 64 bits, signed or unsigned
DEFAULT_MAX_TOKENS = 128
MAX_NUM_DRAFT = 16
MAX_PREDICTED_DRAFTS = 64  # of a request's prediction, for one sequence in one step


class SpeculationMode(StrEnum):
    """How the number of drafts is chosen."""

    AUTO = "auto"  # the server's choice, 0 up to its limit
    OFF = "off"  # plain decoding
    FIXED = "fixed"  # always `num_draft_tokens`, as far as context and max_tokens allow


class Verification(StrEnum):
    """The exact rule that accepts or rejects drafts (`engine/verify.py`)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """A limit on the reasoning at the beginning of an output; after it the end of the reasoning is generated.

    Args:
        max_tokens: maximum number of tokens of reasoning, without its end.
        end: the text that ends the reasoning. An output that reaches it earlier is free of the budget.
        begin: the text with which reasoning begins; an output that begins in another way has none. None: every output
            begins inside of its reasoning.
    """

    max_tokens: int
    end: str
    begin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """The structure that an output must have: exactly one of the first four fields, a budget, or both.

    Args:
        json_schema: the text of a JSON Schema; the output is a document that is valid under it.
        regex: a regular expression; the whole output matches it.
        grammar: a grammar in Lark notation; the whole output matches it.
        choice: texts; the output is one of them.
        thinking: a limit on reasoning. The structure, if there is one, includes the reasoning.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    thinking: ThinkingBudget | None = None

    @property
    def is_free(self) -> bool:
        """Whether the text may be anything: only its reasoning is limited."""
        return all(kind is None for kind in (self.json_schema, self.regex, self.grammar, self.choice))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop. Field names are those of `pilotfish.v1`.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it. At most 100.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 0 keeps one token, 1
            keeps all.
        top_k: keep this many likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest one; in [0, 1].
        repetition_penalty: divides the logit of each token of prompt or output if it is positive, else multiplies it;
            0.01 to 10 (Keskar et al. 2019, section 4.1).
        presence_penalty: subtracted from the logit of each token that the output contains; -2 to 2.
        frequency_penalty: subtracted as many times as the output contains the token; -2 to 2.
        logit_bias: added to the logits of these tokens; -100 to 100.
        allowed_token_ids: only these tokens can be generated; None allows all.
        banned_token_ids: these tokens cannot be generated.
        guided: the structure that the output must have.
        seed: the seed of the request's randomness; a negative one is the unsigned number with the same 64 bits; with
            None a seed is drawn, and the result reports it.
        n: how many outputs; output 0 uses `seed`, the others use seeds derived from it.
        max_tokens: maximum number of tokens to generate; None is 128, or less if the context or the server's limit is
            smaller.
        fit_context: where `max_tokens` is None, or more than the context and the server's limit have room for, generate
            as many as there is room for.
        min_tokens: minimum number of tokens, unless the structure is complete earlier.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the output; they are part of `token_ids`, not of the text.
        ignore_eos: the model's own end-of-text tokens do not end the output.
        logprobs: report the log-probability of each token, and of this many likeliest tokens at its position; None
            reports none. They are of the target's distribution before penalties, bias, bans, structure and temperature.
        prompt_logprobs: the same for each token of the prompt except the first, which has no predecessor.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    guided: Guided | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    fit_context: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def least_mass(self) -> float:
        """`top_p` above 0: a search for the end of a mass of 0 would find no token."""
        return max(self.top_p, sys.float_info.min)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the front ends send of the outputs of a request.

    Args:
        token_ids: send token ids, and which of them were drafts.
        prompt_token_ids: send the tokens of the prompt.
        stream_interval: tokens to gather before a message after the first is sent.
        digests: send a digest of the tokens so far with each message.
        skip_special_tokens: leave special tokens out of the text; None: unless the model's format of calls or reasoning
            has special tokens and the prompt is a conversation.
        stop_in_answer: look for stop strings neither in the reasoning nor in the calls of a conversation's answer.
    """

    token_ids: bool = True
    prompt_token_ids: bool = False
    stream_interval: int = 1
    digests: bool = False
    skip_special_tokens: bool | None = None
    stop_in_answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """The speculation settings of a request; None leaves the choice to the server."""

    mode: SpeculationMode | None = None
    num_draft_tokens: int | None = None
    proposer: str | None = None
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """The effective speculation settings, which the result also reports."""

    mode: SpeculationMode
    num_draft_tokens: int
    proposer: str
    verification: Verification
