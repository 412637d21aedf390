"""Turns a request into sequences: validates it and fills in defaults."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pilotfish.engine.errors import InvalidRequest, Unsupported, shown
from pilotfish.engine.params import (
    MAX_PREDICTED_DRAFTS,
    MAX_SEED,
    SamplingParams,
    SpeculationMode,
    SpeculationSettings,
    Verification,
)
from pilotfish.engine.request.prediction import Prediction, TextAlignment
from pilotfish.engine.request.validation import emitted_violations, unknown_adapter, violations
from pilotfish.engine.types import AUTO, Adapter, KVCursor, ReceivedOutput, Request, Sequence

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from pilotfish.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the models and the arena, fixed at load."""

    vocab_size: int  # width of the target's logits
    max_model_len: int  # maximum number of tokens of prompt and output together
    eos_token_ids: frozenset[int] = frozenset()
    target_border: int | None = None  # maximum length for the model's first rotary table; None: it has only one
    draft_border: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of a loaded engine, which its process sends to the front ends."""

    limits: Limits
    proposer_names: tuple[str, ...]  # names that a request may use
    default_proposer: str  # for requests without one
    page_size: int  # tokens per page of the target's arena
    total_pages: int
    loop: str  # how sequences decode if supported: `rounds` on the device, or `plain` steps
    dtype: str  # of the target's activations, keys and values
    device: str  # of the target


@dataclass(frozen=True, slots=True)
class Intake:
    """Turns requests into sequences. It changes no state, so any thread may call it."""

    config: EngineConfig
    limits: Limits
    proposers: tuple[str, ...]  # names that a request may use
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # the loaded ones, which change
    any_of: tuple[str, ...] = ()  # the candidates of `auto`

    @property
    def default_proposer(self) -> str:
        """The proposer of requests without one."""
        best_first = (name for name in (AUTO, "model", "ngram") if name in self.proposers)
        return self.config.proposer or next(best_first, "none")

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served.

        Raises:
            InvalidRequest: the request is invalid; the error contains all violations.
            Unsupported: this server does not have the proposer, or is reproducible and does not support the rule.
        """
        found = list(violations(request, self.config, self.limits.vocab_size, self.limits.max_model_len))
        found += emitted_violations(request, self.limits.vocab_size, self._max_len(request))
        found += unknown_adapter(request.adapter, self.adapters)
        if found:
            raise InvalidRequest(found)
        name = request.speculation.proposer
        if name is not None and name not in self.proposers:
            raise Unsupported(f"speculation.proposer is {shown(name)}; this server has {', '.join(self.proposers)}")
        if self.config.reproducible and request.speculation.verification is Verification.REJECTION:
            raise Unsupported(
                "speculation.verification is 'rejection'; a reproducible server supports only coupled, because under "
                "rejection the tokens depend on the drafts"
            )

    def open(self, request: Request) -> list[Sequence]:
        """Make one sequence for each output that has not ended, of a request that has passed `check`."""
        seed = secrets.randbelow(MAX_SEED + 1) if request.sampling.seed is None else request.sampling.seed & MAX_SEED
        emitted = request.received or (ReceivedOutput(),) * request.sampling.n
        prediction = Prediction(request.prediction) if request.prediction else None
        outputs = [
            self._sequence(request, index, _seed_of(seed, index), before.token_ids, prediction)
            for index, before in enumerate(emitted)
            if not before.has_ended
        ]
        for sequence in outputs:
            sequence.shared = outputs[0].shared
        return outputs

    def _sequence(
        self, request: Request, index: int, seed: int, emitted: tuple[int, ...], prediction: Prediction | None
    ) -> Sequence:
        """A sequence with `kv_len` 0, even if it has emitted tokens, as after a preemption."""
        tokens, speculation = [*request.token_ids, *emitted], self.speculation_of(request)
        candidates = self.any_of if speculation.proposer == AUTO else ()
        model_ends = frozenset() if request.sampling.ignore_eos else self.limits.eos_token_ids
        return Sequence(
            request=request,
            index=index,
            seed=seed,
            speculation=speculation,
            max_len=self._max_len(request),
            end_token_ids=model_ends | frozenset(request.sampling.stop_token_ids),
            tokens=tokens,
            num_emitted=len(emitted),
            candidates=candidates,
            choice=next(iter(candidates), ""),
            target=KVCursor.of(self.limits.target_border, len(tokens)),
            draft=KVCursor.of(self.limits.draft_border, len(tokens)),
            grammar=None if request.grammar is None else request.grammar.start(),
            grammar_lag=0 if request.grammar is None else len(emitted),
            alignment=None if prediction is None else TextAlignment(prediction),
            most_predicted=self._most_predicted(request, speculation),
            adapter=None if request.adapter is None else self.adapters[request.adapter],
        )

    @staticmethod
    def _most_predicted(request: Request, speculation: SpeculationSettings) -> int:
        """Maximum number of drafts of a prediction: above K unless the request sets K, as long runs are accepted."""
        if not request.prediction:
            return 0
        is_free = speculation.mode is SpeculationMode.AUTO and request.speculation.num_draft_tokens is None
        return MAX_PREDICTED_DRAFTS if is_free and speculation.num_draft_tokens else speculation.num_draft_tokens

    def _max_len(self, request: Request) -> int:
        return request.max_len(self.limits.max_model_len, self.config.max_output_tokens)

    def speculation_of(self, request: Request) -> SpeculationSettings:
        """The request's settings, with the server's defaults for unset ones, and the server's limit on drafts."""
        asked, config = request.speculation, self.config
        mode = asked.mode or config.speculation
        wanted = config.num_draft_tokens if asked.num_draft_tokens is None else asked.num_draft_tokens
        proposer = "none" if mode is SpeculationMode.OFF else asked.proposer or self.default_proposer
        return SpeculationSettings(
            mode=mode,
            num_draft_tokens=0 if proposer == "none" else min(wanted, config.num_draft_tokens),
            proposer=proposer,
            verification=asked.verification or config.verification,
        )


def _seed_of(seed: int, index: int) -> int:
    """The seed of an output: the request's for output 0, a hash for others, so that each can be reproduced alone."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def self_test_request(max_model_len: int) -> Request:
    """A minimal request that every working engine can serve."""
    sampling = SamplingParams(max_tokens=min(8, max_model_len - 1), ignore_eos=True)
    return Request(request_id="trial", token_ids=(0,), sampling=sampling)
