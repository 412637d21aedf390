"""What a request may ask for: sampling, structure, speculation. `request/validation.py` checks the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_SEED = 2**64 - 1
DEFAULT_MAX_TOKENS = 128
MAX_NUM_DRAFT = 16


class SpeculationMode(StrEnum):
    """How the number of drafts is chosen."""

    AUTO = "auto"  # the server's choice, 0 up to its limit
    OFF = "off"  # plain decoding
    FIXED = "fixed"  # always `num_draft_tokens`, as far as context and max_tokens allow


class Verification(StrEnum):
    """Which exact rule keeps or drops drafts (`engine/verify.py`)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """The structure that an output must have: exactly one of these.

    Args:
        json_schema: the text of a JSON Schema; the output is a document that it accepts.
        regex: the output matches it as a whole.
        grammar: the output is of this grammar, in Lark notation.
        choice: the output is one of these texts.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to sample and when to stop. Field names are those of `pilotfish.v1`.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it. At most 100.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; in (0, 1], 1 keeps all.
        top_k: keep this many likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest one; in [0, 1].
        repetition_penalty: divides the logit of a token of prompt or output if positive, else multiplies it;
            above 0, up to 10 (Keskar et al. 2019, section 4.1).
        presence_penalty: subtracted from the logit of each token of the output; -2 to 2.
        frequency_penalty: subtracted once per time the output has the token; -2 to 2.
        logit_bias: added to the logits of these tokens; -100 to 100.
        allowed_token_ids: no other token may come; None allows all.
        banned_token_ids: these tokens may not come.
        guided: the structure that the output must have.
        seed: the request's randomness; None draws one, which the result reports.
        n: how many outputs; output 0 uses `seed`, the others seeds derived from it.
        max_tokens: most tokens to generate; None is 128, or what the context has room for.
        min_tokens: tokens before anything but `max_tokens` may end the output, unless its structure is complete.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the output; they are part of `token_ids`, not of the text.
        ignore_eos: go on past the model's own end-of-text tokens.
        logprobs: report the log-probability of each token, and of this many likeliest ones beside it; None reports
            none. They are of the model's own law: before penalties, bias, bans, structure and temperature.
        prompt_logprobs: the same for each token of the prompt but the first, which nothing precedes.
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
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """What a request asks of speculation; None leaves the choice to the server."""

    mode: SpeculationMode | None = None
    num_draft_tokens: int | None = None
    proposer: str | None = None
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """What is done about it: the effective settings, echoed in the result."""

    mode: SpeculationMode
    num_draft_tokens: int
    proposer: str
    verification: Verification
