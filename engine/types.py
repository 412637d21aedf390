"""The data types of the engine. Only `Sequence` is mutable."""

from __future__ import annotations

import math
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pilotfish.engine.params import (
    DEFAULT_MAX_TOKENS,
    OutputOptions,
    SamplingParams,
    SpeculationParams,
    SpeculationSettings,
)

if TYPE_CHECKING:
    from torch import Tensor

PREDICTION = "prediction"  # name of a draft source, not of a request's proposer
AUTO = "auto"  # name of a proposer: in each step one of all loaded ones

_ENDLESS = 2**31


EMPTY_STATE = 0  # the slot of the initial state of every sequence: zeros, never written


@dataclass(slots=True)
class StateSlot:
    """A slot that holds the state of one sequence at position `base`, and a log of positions `base .. end - 1`."""

    slot: int
    base: int = -1  # empty yet
    end: int = -1
    is_own: bool = True  # else it belongs to a page of the prefix cache and is read-only


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The plan of a pass for the state of one sequence (`engine/kv/states.py`).

    It reads slot `read`, which has the state at `base`, and applies its log up to the pass's first position. If
    `settled` is beyond `base`, it writes the state at `settled` to slot `write`, and logs later tokens in that slot;
    else `write` is `read`, and the tokens are appended to the log there. `snapshot`: a second slot to write, and its
    position.
    """

    read: int
    base: int
    write: int
    settled: int
    snapshot: tuple[int, int] | None = None


@dataclass(slots=True)
class KVCursor:
    """The K/V of one sequence in one model. `rollback` is the only way to drop drafts.

    `page_table[i]` is the arena page that holds positions `[i * page_size, (i + 1) * page_size)`;
    the first `kv_len` positions hold valid keys and values. Rows beyond `kv_len` are stale and are
    overwritten before they are read, so nothing is ever copied, cleared or freed to take tokens back.

    If a model has two rotary tables, K/V of one cannot be used with the other: a sequence that has grown beyond
    `border` tokens is recomputed from its start (`is_outgrown`).
    """

    page_table: list[int] = field(default_factory=list)
    kv_len: int = 0
    shared: list[int] = field(default_factory=list)  # prefix-cache keys of its leading pages
    border: int | None = None  # maximum length for the model's first rotary table; None: it has only one
    table: int = 0  # the rotary table of the K/V
    states: list[StateSlot] = field(default_factory=list)  # of a model with recurrent state
    pending: tuple[StateSpan, int] | None = None  # the plan of the current pass, and its end

    @classmethod
    def of(cls, border: int | None, num_tokens: int) -> KVCursor:
        return cls(border=border, table=int(border is not None and num_tokens > border))

    def table_for(self, num_tokens: int) -> int:
        """The rotary table of a whole sequence of `num_tokens`."""
        return int(self.border is not None and num_tokens > self.border)

    def is_outgrown(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` needs another table than that of the K/V."""
        return self.table_for(num_tokens) != self.table

    def room_before_border(self, num_tokens: int) -> int:
        """Number of further tokens with the same table; 2**31 if the model has only one."""
        return self.border - num_tokens if self.border is not None and num_tokens <= self.border else _ENDLESS

    def advance(self, stop: int) -> None:
        """Record that the model has been fed every position before `stop`."""
        assert stop >= self.kv_len, "a forward pass moves forward"
        self.kv_len = stop
        if self.pending is not None:
            self._settle(*self.pending)
            self.pending = None

    def span(self, start: int, stop: int, known: int, page_size: int | None = None) -> StateSpan | None:
        """Plan the state of a pass over positions start .. stop - 1; None for a model without.

        The first `known` tokens of the sequence are never rolled back. At the last page boundary in the pass the state
        is also written for the prefix cache, if there is a slot.
        """
        if not self.states:
            return None
        held = [state for state in self.states if state.base <= start <= state.end]
        read = max(held, key=lambda state: state.base, default=StateSlot(EMPTY_STATE, 0, 0))
        assert held or not start, "no slot holds the state at the first position of a pass"
        settled = max(read.base, min(stop, known))
        others = sorted((s for s in self.states if s.is_own and s is not read), key=lambda state: state.base)
        boundary = 0 if page_size is None else settled // page_size * page_size
        snapshot = (others[1].slot, boundary) if len(others) > 1 and read.base < boundary < settled else None
        write = others[0].slot if settled > read.base else read.slot
        assert write != read.slot or read.is_own, "drafts are logged in a slot that others read"
        span = StateSpan(read.slot, read.base, write, settled, snapshot)
        for state in others:  # a failed pass may have written to them, so they are empty until it has succeeded
            if state.slot == write or (snapshot is not None and state.slot == snapshot[0]):
                state.base = state.end = -1
        self.pending = span, stop
        return span

    def _settle(self, span: StateSpan, stop: int) -> None:
        """Record the contents of the slots after a successful pass."""
        for state in self.states:
            if state.slot == span.write and state.is_own:
                state.base, state.end = span.settled, stop
            elif span.snapshot is not None and state.slot == span.snapshot[0]:
                state.base = state.end = span.snapshot[1]

    def reset_states(self) -> None:
        """Clear the slots, to recompute the sequence from its start."""
        for state in self.states:
            state.base = state.end = -1
        self.pending = None

    def rollback(self, num_tokens: int) -> None:
        """Roll back to a sequence of `num_tokens`, without its newest token (I1, I3)."""
        self.kv_len = min(self.kv_len, num_tokens - 1)
        self.pending = None


class FinishReason(StrEnum):
    """Why a request ended. Each admitted request ends exactly once."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # the caller disconnected
    DEADLINE = "deadline"  # the caller's deadline passed
    ABORTED = "aborted"  # by an operator, or because the reader stalled
    ERROR = "error"  # an error of the server or of this request; see `FinishedOutput.error`


# Maximum tokens that a state takes at once: about 20 ms in the most expensive structures.
GRAMMAR_TOKENS = 16


class GrammarState(Protocol):
    """The position of one output in its structure. Every `advance` can be rolled back, because drafts can be rejected.

    A failure of the structure (limits, a state without a next token) raises GrammarFault. The state is then unusable
    and replaced by a new one. Only an output that cannot continue without the failed operation ends.
    """

    def fill(self, mask: Tensor) -> None:
        """Write the allowed next tokens to `mask`, bool `[vocab]` on the CPU, including end tokens if it may end."""

    def advance(self, tokens: Seq[int]) -> int:
        """Advance by the longest valid prefix of `tokens`; return its length."""

    def rollback(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens`."""


class Alignment(Protocol):
    """The alignment of one output with its prediction (`engine/request/prediction.py`)."""

    def num_had_of(self, num_tokens: int) -> int:
        """Number of the prediction's tokens in the first `num_tokens` of the output, which must have been followed."""

    def follow(self, tokens: Seq[int], prompt_len: int, most: int) -> bool:
        """Process a sequence's new tokens, at most `most`; return whether all were processed."""

    def drafts(self, k: int) -> tuple[int, ...]:
        """The predicted next tokens, at most `k`; empty if the output has left the prediction."""


class Grammar(Protocol):
    """A compiled structure, shared by its requests."""

    def start(self) -> GrammarState:
        """The state before the first generated token."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded low-rank adapter of the target. `number` is above 0 and unique in a process."""

    name: str
    number: int
    fingerprint: str  # a hash of its files


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedOutput:
    """The received part of one output of an interrupted stream: its tokens, or only their number.

    Args:
        token_ids: all its tokens so far.
        has_ended: its end was received, so nothing more is sent.
        num_tokens: number of tokens to regenerate without sending them.
        digest: of the first `num_tokens` tokens (`server/streams`); empty: not compared.
        tail: text held back until the end was received.
        recount: the end was received but not stored: the output is regenerated and its end sent again.
    """

    token_ids: tuple[int, ...] = ()
    has_ended: bool = False
    num_tokens: int = 0
    digest: str = ""
    tail: bool = False
    recount: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The state of an interrupted stream: its received outputs by index, and the number of earlier interruptions.

    `fingerprint`: of the model that began it.
    """

    outputs: tuple[ReceivedOutput, ...] = ()
    fingerprint: str = ""
    interruptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue, created by a front end and run by the engine.

    Args:
        token_ids: the prompt; empty until the front end has encoded the text.
        request_id: unique among live requests.
        model: the served model or one of its adapters, as named by the caller; the engine reads `adapter`.
        output: what to send back, and how; for the front ends.
        grammar: `sampling.guided`, compiled; never sent.
        priority: higher ones leave the queue first.
        cache_salt: requests share K/V of equal prompts only if their salts are equal.
        resume: the outputs emitted before, if the request is resumed; the seed is then set.
        prediction: the expected output, drafted where the output follows it.
        adapter: name of the target's adapter; None: without.
        caller: for fair sharing. Callers get equal shares (`engine/turns.py`).
    """

    token_ids: tuple[int, ...] = ()
    request_id: str = ""
    model: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    output: OutputOptions = field(default_factory=OutputOptions)
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str | None = None
    resume: Resume | None = None
    prediction: tuple[int, ...] = ()
    adapter: str | None = None
    caller: str = ""

    @property
    def received(self) -> tuple[ReceivedOutput, ...]:
        """The received part of each output; empty unless the request is resumed."""
        return () if self.resume is None else self.resume.outputs

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the outputs that have not ended."""
        ended = {index for index, output in enumerate(self.received) if output.has_ended}
        return tuple(index for index in range(self.sampling.n) if index not in ended)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus those of the longest output emitted before."""
        return len(self.token_ids) + max((len(output.token_ids) for output in self.received), default=0)

    def max_len(self, max_model_len: int, max_output_tokens: int | None = None) -> int:
        """Maximum number of tokens of prompt and output: as requested, or the default, limited by the room."""
        sampling, limit = self.sampling, max_output_tokens or max_model_len
        if sampling.fit_context:
            asked = min(sampling.max_tokens or limit, limit)
        else:
            asked = sampling.max_tokens or min(DEFAULT_MAX_TOKENS, limit)
        return min(max_model_len, len(self.token_ids) + asked)


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Speculation statistics of one output. `accepted_per_position[i]` counts rounds that accepted draft i."""

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
        """These counts plus one verified round."""
        kept = list(self.accepted_per_position) + [0] * (num_draft - len(self.accepted_per_position))
        kept[:num_accepted] = [count + 1 for count in kept[:num_accepted]]
        return DraftStats(self.rounds + 1, self.drafted + num_draft, self.accepted + num_accepted, tuple(kept))


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the target's distribution; `top`: the most likely tokens, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(eq=False)  # compared by identity: two requests may have equal tokens
class Sequence:
    """One output that is being generated. There is no prefill or decode phase: `kv_len` chases `len(tokens)`."""

    request: Request
    seed: int
    speculation: SpeculationSettings
    max_len: int  # maximum number of tokens of prompt and output
    end_token_ids: frozenset[int]  # tokens that end the output: the request's stop tokens and the model's end tokens
    tokens: list[int]
    index: int = 0  # index among the request's outputs
    adapter: Adapter | None = None  # of the target; it stays in memory while a sequence refers to it
    num_emitted: int = 0  # number of generated tokens emitted by an earlier engine
    candidates: tuple[str, ...] = ()  # proposers from which control chooses; empty: the request names one
    choice: str = ""  # the current proposer
    target: KVCursor = field(default_factory=KVCursor)
    draft: KVCursor = field(default_factory=KVCursor)  # of the current proposer (`turn_to`)
    drafts: dict[str, KVCursor] = field(default_factory=dict)  # of each used proposer with K/V
    stats: DraftStats = field(default_factory=DraftStats)
    grammar: GrammarState | None = None
    grammar_lag: int = 0  # generated tokens that its state must take before the sequence is fed again
    fault: str | None = None  # why this output cannot continue, or why its drafts cannot be verified
    mask_seconds: float = 0.0  # CPU time of one mask of its structure in the last step
    num_missed: int = 0  # consecutive steps without it, because of others' turns
    shared: dict[Hashable, Tensor] = field(default_factory=dict)  # tensors that sampling creates once for all outputs
    output_counts: Tensor | None = None  # float32 [vocab], of the first `num_counted` generated tokens
    num_counted: int = 0
    num_cached: int = 0  # prompt tokens whose K/V came from the prefix cache
    num_charged: int = 0  # leading tokens that count for its caller's share
    num_started: int = 0  # number of tokens when it last started to run
    alignment: Alignment | None = None  # with the request's prediction
    most_predicted: int = 0  # maximum number of predicted drafts in a step
    predicted: tuple[int, ...] = ()  # predicted drafts for the next step
    on_device: bool = False  # it decodes in rounds on the device (`engine/device_loop`) instead of plain steps
    in_flight: int = 0  # upper bound of tokens in rounds whose results the host has not read
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)  # None for the first token

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """The number of prompt tokens."""
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_predicted(self) -> bool:
        """Whether its prediction drafts in the next step."""
        return bool(self.predicted)

    @property
    def drafter(self) -> str:
        """The draft source of the next step: the prediction if the output follows it, else its proposer."""
        return PREDICTION if self.is_predicted else self.choice or self.speculation.proposer

    @property
    def drafters(self) -> tuple[str, ...]:
        """The proposers that may draft for it."""
        return self.candidates or (self.speculation.proposer,)

    def draft_of(self, name: str) -> KVCursor:
        """The cursor of the draft model or head `name`; each has its own arena and pages."""
        if name not in self.drafts:
            self.drafts[name] = KVCursor.of(self.draft.border, len(self.tokens)) if self.drafts else self.draft
        return self.drafts[name]

    def turn_to(self, name: str) -> None:
        """Set `draft` to the cursor of this proposer."""
        self.draft = self.draft_of(name)

    def rollback(self, num_tokens: int) -> None:
        """Roll back the cursors of all models to `num_tokens`, without the newest token (I1, I3)."""
        self.target.rollback(num_tokens)
        self.rollback_drafts(num_tokens)

    def rollback_drafts(self, num_tokens: int) -> None:
        """The same for proposers only."""
        for cursor in self.drafts.values() or (self.draft,):
            cursor.rollback(num_tokens)

    @property
    def most_drafts(self) -> int:
        """Maximum number of drafts in the next step."""
        return self.most_predicted if self.is_predicted else self.speculation.num_draft_tokens

    @property
    def todo(self) -> int:
        """Number of tokens that the target has not been fed; 1 if only the newest is left (I1)."""
        return len(self.tokens) - self.target.kv_len

    @property
    def is_behind(self) -> bool:
        """Whether it has prompt or recomputed tokens to be fed now."""
        return self.todo > 1 and not self.grammar_lag

    def num_before_stop(self, fresh: Seq[int]) -> int:
        """The number of `fresh` tokens that plain decoding would have generated: up to an end token or `max_len`."""
        room = min(len(fresh), self.max_len - len(self.tokens))
        return next((i + 1 for i in range(room) if fresh[i] in self.end_token_ids), room)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some are missing; output 0 collects them for all, and emits them with its first token."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.index == 0 and not self.num_emitted
        return wanted and len(self.prompt_logprobs) < self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations of one output from its arrival, in seconds; the others include the time in the queue."""

    queue: float
    first_token: float | None  # None: no token
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOutput:
    """The terminal event of an output (I6). The stream adds the last three fields."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    speculation: SpeculationSettings
    stats: DraftStats
    spec_gain: float = 1.0  # estimated tokens per second relative to plain decoding
    stop_token_id: int | None = None
    cached_prompt_tokens: int = 0
    accepted_prediction_tokens: int = 0  # tokens of the request's prediction that occur in the output, in order
    error: str | None = None
    stop_string: str | None = None
    timing: Timing | None = None
    interruptions: int = 0  # number of interruptions


class TokenEvent(NamedTuple):
    """The new tokens of one output, from one step or several merged ones.

    `from_draft[i]`: token i was an accepted draft. `logprobs` has one entry per token if the request wants them;
    `prompt_logprobs` come with the first tokens. The stream adds the last four fields: `texts[i]` is the text of token
    i, `tail` text that was held back until the end, `digest` that of all tokens so far, and `text_offset` the number of
    characters before these. A tuple, because there is one per token.
    """

    request_id: str
    index: int = 0  # type: ignore[assignment]  # of the output, in place of a tuple's method
    token_ids: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    finished: FinishedOutput | None = None
    texts: tuple[str, ...] = ()
    tail: str = ""
    digest: str = ""
    text_offset: int = 0

    @property
    def text(self) -> str:
        """The new text as one string."""
        return "".join(self.texts) + self.tail if self.tail or len(self.texts) != 1 else self.texts[0]
