"""What a server answers, as frozen values. Field names and units are those of the protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have come, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was under the target's own law; `top` holds the likeliest ones there, best first."""

    logprob: float
    top: tuple[Candidate, ...] = ()


PromptLogprobs = tuple[TokenLogprob | None, ...]  # one per token of the prompt, None for the first


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token brought. `from_draft` is None for text that no token in the delta accounts for."""

    text: str
    from_draft: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens of one round of speculation, or of several if this reader was slower than the model."""

    index: int
    text: str
    token_ids: Tokens
    from_draft: tuple[bool, ...]
    text_lengths: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, where asked for
    prompt_logprobs: PromptLogprobs | None = None  # where asked for, on the first delta of output 0

    def pieces(self) -> Iterator[Piece]:
        """The text cut by token: "def f" with lengths [3, 2] -> "def", " f"; what is left over comes last."""
        cuts = list(accumulate(self.text_lengths, initial=0))
        for (start, stop), draft in zip(pairwise(cuts), self.from_draft, strict=True):
            if stop > start:
                yield Piece(self.text[start:stop], draft)
        if rest := self.text[cuts[-1] :]:
            yield Piece(rest, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What drafting did. `accepted_per_position[i]` counts the rounds that kept draft i."""

    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: Tokens
    acceptance_length: float
    gain_ratio: float  # tokens per second over plain decoding's, by the server's estimate

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; NaN if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds since the request arrived at the server."""

    queue_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The settings that were used."""

    mode: str
    num_draft_tokens: int
    proposer: str
    verification: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an output: `finish_reason` is stop, length, cancelled, deadline or aborted."""

    index: int
    finish_reason: str
    stop_token_id: int | None
    stop_string: str | None
    usage: Usage
    speculation_stats: SpeculationStats
    timing: Timing
    seed: int
    speculation: Speculation

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second since the first step, the prompt's included; NaN if no time passed."""
        seconds = self.timing.total_seconds - self.timing.queue_seconds
        return self.usage.completion_tokens / seconds if seconds > 0 else math.nan


Event = Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One whole continuation."""

    index: int
    text: str
    token_ids: Tokens
    from_draft: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...]  # one per token, where asked for
    finished: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All continuations of one prompt; the properties are those of the first, which without `n` is the only one."""

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    prompt_logprobs: PromptLogprobs | None = None  # where asked for

    @property
    def text(self) -> str:
        """Text of output 0."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> Tokens:
        """Tokens of output 0."""
        return self.outputs[0].token_ids

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """Which tokens of output 0 were accepted drafts."""
        return self.outputs[0].from_draft

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of output 0, where asked for."""
        return self.outputs[0].logprobs

    @property
    def finished(self) -> Finished:
        """How output 0 ended."""
        return self.outputs[0].finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What runs there: `state` is starting, ready, draining or failed."""

    version: str
    state: str
    uptime_seconds: float
    max_queue_requests: int
    max_queue_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model and the limits it is served with."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the server is."""

    running_requests: int
    waiting_requests: int
    queued_tokens: int
    total_pages: int
    free_pages: int
    spec_gain_ratio: float  # tokens per second over plain decoding's, by the server's estimate
