"""The nouns of the engine. `Sequence` is the only one that changes; all others are frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**64 - 1
DEFAULT_MAX_TOKENS = 128
MAX_NUM_DRAFT = 16
_ENDLESS = 2**31


class FinishReason(StrEnum):
    """Why a request ended. Each admitted request ends exactly once."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # the caller went away
    DEADLINE = "deadline"  # the caller's deadline passed
    ABORTED = "aborted"  # an operator, or a reader that stalled
    ERROR = "error"  # a fault of the server or of this request alone; `FinishedOutput.error` says which


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


class GrammarState(Protocol):
    """Where one output stands in its structure. After any `advance` it can go back: drafts are tried and taken back.

    A fault of the structure (its limits, a state with no way on) raises GrammarFault; the state is then of no more
    use, and a new one takes its place. An output ends where it cannot go on without what failed, and no other does.
    """

    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next into `mask`, bool `[vocab]` on the CPU; end tokens where it may end."""
        ...

    def advance(self, tokens: Seq[int]) -> int:
        """Take the longest leading part of `tokens` that fits; how many that are."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` that were taken."""
        ...


class Grammar(Protocol):
    """A compiled structure, shared by all requests that ask for it."""

    def start(self) -> GrammarState:
        """The state before the first generated token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Args:
        request_id: unique among live requests.
        token_ids: the prompt, to be continued as `sampling` says.
        grammar: `sampling.guided`, compiled by whoever knows the tokenizer.
        cache_salt: requests share keys and values of equal prompts only under the same salt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    grammar: Grammar | None = None
    cache_salt: str | None = None

    def max_len(self, max_model_len: int, max_output_tokens: int | None = None) -> int:
        """Prompt plus the most tokens that may be generated: as asked, or the default where there is room."""
        default = min(DEFAULT_MAX_TOKENS, max_output_tokens or DEFAULT_MAX_TOKENS)
        return min(max_model_len, len(self.token_ids) + (self.sampling.max_tokens or default))


@dataclass(slots=True)
class KVCursor:
    """Where one model stands in one sequence: the whole of speculative rollback is `rollback` below.

    `page_table[i]` is the arena page that holds positions `[i * page_size, (i + 1) * page_size)`;
    the first `kv_len` positions hold valid keys and values. Rows beyond `kv_len` are stale and are
    overwritten before they are read, so nothing is ever copied, cleared or freed to take tokens back.

    Where a model has two rotary tables, K/V made with one is no good for the other: a sequence that has grown
    beyond `border` tokens starts again from nothing (`is_outgrown`), as if it had been that long from the start.
    """

    page_table: list[int] = field(default_factory=list)
    kv_len: int = 0
    shared: list[int] = field(default_factory=list)  # what the prefix cache calls the leading pages that it knows
    border: int | None = None  # longest sequence of the model's first rotary table; None: it has but one
    table: int = 0  # the rotary table that the K/V was made with

    @classmethod
    def of(cls, border: int | None, num_tokens: int) -> KVCursor:
        """The cursor of a new sequence of `num_tokens`."""
        return cls(border=border, table=int(border is not None and num_tokens > border))

    def table_for(self, num_tokens: int) -> int:
        """The rotary table of a whole sequence of `num_tokens`."""
        return int(self.border is not None and num_tokens > self.border)

    def is_outgrown(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` asks for another table than the K/V was made with."""
        return self.table_for(num_tokens) != self.table

    def room_before_border(self, num_tokens: int) -> int:
        """How many more tokens can be fed with the same table; 2**31 or so where that never ends."""
        return self.border - num_tokens if self.border is not None and num_tokens <= self.border else _ENDLESS

    def advance(self, stop: int) -> None:
        """The model has now been fed every position before `stop`."""
        assert stop >= self.kv_len, "a forward pass moves forward"
        self.kv_len = stop

    def rollback(self, num_tokens: int) -> None:
        """Keep what is true of a sequence of `num_tokens`, whose newest token has never been fed (I1, I3)."""
        self.kv_len = min(self.kv_len, num_tokens - 1)


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What speculation did for one request. `accepted_per_position[i]` counts rounds that kept draft i."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed; NaN before the first draft."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def acceptance_length(self) -> float:
        """1 + mean number of drafts kept per round: tokens per target step; NaN before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else math.nan

    def after(self, num_draft: int, num_accepted: int) -> DraftStats:
        """These counts and one more verified round."""
        kept = list(self.accepted_per_position) + [0] * (num_draft - len(self.accepted_per_position))
        kept[:num_accepted] = [count + 1 for count in kept[:num_accepted]]
        return DraftStats(self.rounds + 1, self.drafted + num_draft, self.accepted + num_accepted, tuple(kept))


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that could have come, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was under the target's own law; `top` holds the likeliest ones there, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(eq=False)  # compared by identity: two requests may hold the same tokens
class Sequence:
    """One output on its way. There is no prefill phase and no decode phase: `kv_len` chases `len(tokens)`."""

    request: Request
    seed: int
    speculation: SpeculationSettings
    max_len: int  # prompt plus the most tokens that may be generated
    end_token_ids: frozenset[int]  # what ends the output: the request's stop tokens and the model's own
    tokens: list[int]
    index: int = 0  # which of the request's outputs
    target: KVCursor = field(default_factory=KVCursor)
    draft: KVCursor = field(default_factory=KVCursor)
    stats: DraftStats = field(default_factory=DraftStats)
    grammar: GrammarState | None = None
    fault: str | None = None  # why this output cannot go on
    num_cached: int = 0  # prompt tokens whose K/V an earlier request had made
    on_device: bool = False  # it decodes in rounds on the device (`round_loop`) and not in the plain loop
    in_flight: int = 0  # most tokens beyond `tokens` that rounds whose outcome the host has not read may have brought
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)  # None for the first token

    @property
    def request_id(self) -> str:
        """The id of its request."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """How many of `tokens` the caller sent."""
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """How many of `tokens` are ours."""
        return len(self.tokens) - self.prompt_len

    @property
    def todo(self) -> int:
        """Tokens that the target has not been fed; 1 when only the newest is left (I1)."""
        return len(self.tokens) - self.target.kv_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some are still missing; output 0 collects them for all."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOutput:
    """The one terminal event of an output (I6)."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    speculation: SpeculationSettings
    stats: DraftStats
    spec_gain: float = 1.0  # tokens per second over what plain decoding would have made, as far as known
    stop_token_id: int | None = None
    cached_prompt_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one step brought one output; `from_draft[i]` tells an accepted draft from a target token.

    `logprobs` has one entry per token where they were asked for; `prompt_logprobs` come with the first tokens.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    finished: FinishedOutput | None = None
