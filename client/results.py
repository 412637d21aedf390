"""The server's answers as frozen values. Field names and units are those of the protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate token at one position, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the target's distribution; `top` has the most likely tokens, best first."""

    logprob: float
    top: tuple[Candidate, ...] = ()


PromptLogprobs = tuple[TokenLogprob | None, ...]  # one per token of the prompt, None for the first


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token added. `from_draft` is None for text that belongs to no token of the delta."""

    text: str
    from_draft: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens of one speculation round, or of several rounds if this reader is slower than the model."""

    index: int
    text: str
    token_ids: Tokens
    from_draft: tuple[bool, ...]
    text_lengths: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if requested
    prompt_logprobs: PromptLogprobs | None = None  # if requested, on the first delta of output 0
    prompt_token_ids: Tokens | None = None  # if requested, on the first event of a stream
    starts_in_reasoning: bool = False  # on the first event of a stream; see `Completion`

    def pieces(self) -> Iterator[Piece]:
        """Split the text by token: "def f" with lengths [3, 2] -> "def", " f"; any remaining text comes last."""
        cuts = list(accumulate(self.text_lengths, initial=0))
        for (start, stop), draft in zip(pairwise(cuts), self.from_draft, strict=True):
            if stop > start:
                yield Piece(self.text[start:stop], draft)
        if rest := self.text[cuts[-1] :]:
            yield Piece(rest, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Statistics of drafting. `accepted_per_position[i]` counts the rounds that accepted draft i."""

    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: Tokens
    acceptance_length: float
    gain_ratio: float  # tokens per second relative to plain decoding, estimated by the server

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; NaN if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times in seconds since the request arrived at the server."""

    queue_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The speculation settings that the server used."""

    mode: str
    num_draft_tokens: int
    proposer: str
    verification: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an output: `finish_reason` is stop, length, cancelled, deadline or aborted.

    `interruptions` counts how often the output was interrupted and resumed, by this client or after a failure of the
    engine. The statistics and `cached_prompt_tokens` then count from the last interruption.
    """

    index: int
    finish_reason: str
    stop_token_id: int | None
    stop_string: str | None
    usage: Usage
    speculation_stats: SpeculationStats
    timing: Timing
    seed: int
    speculation: Speculation
    interruptions: int

    @property
    def tokens_per_second(self) -> float:
        """Return generated tokens per second since the first step, which includes the prompt; NaN if no time passed."""
        seconds = self.timing.total_seconds - self.timing.queue_seconds
        return self.usage.completion_tokens / seconds if seconds > 0 else math.nan


Event = Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One complete output."""

    index: int
    text: str
    token_ids: Tokens
    from_draft: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...]  # one per token, if requested
    finished: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All outputs of one prompt. The properties refer to output 0, which is the only one without `n`."""

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    prompt_logprobs: PromptLogprobs | None = None  # if requested
    prompt_token_ids: Tokens | None = None  # if requested
    starts_in_reasoning: bool = False  # whether the output begins with reasoning, whose start is in the prompt

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> Tokens:
        return self.outputs[0].token_ids

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """Return for each token of output 0 whether it was an accepted draft."""
        return self.outputs[0].from_draft

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of output 0, if requested."""
        return self.outputs[0].logprobs

    @property
    def finished(self) -> Finished:
        """Return how output 0 ended."""
        return self.outputs[0].finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The server's description; `state` is starting, ready, draining or failed."""

    version: str
    state: str
    uptime_seconds: float
    max_queue_requests: int
    max_queue_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around the reasoning at the beginning of an output; `begin` may already be part of the prompt."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model and its limits."""

    model: str
    draft_model: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: Tokens
    has_tokenizer: bool
    proposers: tuple[str, ...]
    speculation: Speculation
    max_batch_size: int
    max_batch_tokens: int
    adapters: tuple[str, ...] = ()
    has_chat_template: bool = False
    reasoning_marks: ReasoningMarks | None = None  # None: the model marks no reasoning

    @property
    def answers_questions(self) -> bool:
        """Whether a prompt should be a user's turn. The embedded model has a template, but only completes code."""
        return self.has_chat_template and self.model != "pilotfish-embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The current load of the server."""

    running_requests: int
    waiting_requests: int
    queued_tokens: int
    total_pages: int
    free_pages: int
    spec_gain_ratio: float  # tokens per second relative to plain decoding, estimated by the server
