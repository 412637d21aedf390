"""Continuation of interrupted streams: what a caller has received, and what it needs to go on elsewhere.

A stream's first message has a `ResumeInfo`. With it and the tokens that were received, any server of the same model
continues the stream. Over HTTP both are in the id of each event, with numbers of tokens in place of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from engine.errors import GrammarFault, InvalidRequest, Violation, shown
from engine.params import MAX_SEED, SpeculationMode, SpeculationSettings, Verification
from engine.types import GRAMMAR_TOKENS, EmittedOutput, Grammar, Request
from pilotfish.v1 import generation_pb2 as pb
from server.errors import ResumeRefused
from server.model import ServedModel
from server.streams.stream import NOTHING_RECEIVED, ReceivedOutput
from server.turns import max_len_of

MODES = {pb.SpeculationMode.Value(f"SPECULATION_MODE_{mode.name}"): mode for mode in SpeculationMode}
VERIFICATIONS = {pb.Verification.Value(f"VERIFICATION_{rule.name}"): rule for rule in Verification}


def speculation_settings(settings: SpeculationSettings) -> pb.SpeculationOptions:
    """Return the effective settings with every field set."""
    return pb.SpeculationOptions(
        mode=pb.SpeculationMode.Value(f"SPECULATION_MODE_{settings.mode.name}"),
        num_draft_tokens=settings.num_draft_tokens,
        proposer=settings.proposer,
        verification=pb.Verification.Value(f"VERIFICATION_{settings.verification.name}"),
    )


MAX_INTERRUPTIONS = 999_999  # that are counted
_EVENT_ID = re.compile(
    r"(?P<fingerprint>[0-9a-f]{1,64})-(?P<seed>\d{1,20})-(?P<times>\d{1,6})-(?P<outputs>[0-9a-f:+!,]*)"
)
_OUTPUT = re.compile(r"(?P<count>[0-9a-f]{1,7})(:(?P<digest>[0-9a-f]{16}))?(?P<tail>\+)?(?P<end>!)?")


def resume_info(request: Request, model: ServedModel, fingerprint: str) -> pb.ResumeInfo:
    """Return what the caller needs to continue the stream of `request` on another server with this fingerprint."""
    engine = model.engine
    assert request.sampling.seed is not None, "drawn when the request was converted"
    return pb.ResumeInfo(
        fingerprint=fingerprint,
        seed=request.sampling.seed,
        max_tokens=max_len_of(request, engine) - len(request.token_ids),
        speculation=speculation_settings(engine.speculation_of(request)),
    )


def received_outputs(
    message: pb.GenerateRequest, model: ServedModel, fingerprint: str, found: list[Violation]
) -> tuple[ReceivedOutput, ...]:
    """Convert `resume`: one entry per output, or none if the request is a new one. Violations are added to `found`.

    Raises ResumeRefused if the stream is one of another model and adapter than `fingerprint` names.
    """
    if not message.HasField("resume"):
        return ()
    asked, n = message.resume, message.sampling.n if message.sampling.HasField("n") else 1
    most, max_n = model.engine.max_model_len, model.engine.config.max_n
    if asked.fingerprint != fingerprint:
        theirs = f"resume.fingerprint is {shown(asked.fingerprint)}"
        raise ResumeRefused(f"{theirs}; the one of {model.name} here is {fingerprint!r}")
    if not message.sampling.HasField("seed"):
        found.append(Violation("sampling.seed", "is missing; resume needs the seed with which the stream began"))
    if n > max_n:  # the engine refuses it
        return ()
    if len(asked.outputs) > n:
        found.append(Violation("resume.outputs", f"has {len(asked.outputs)} outputs; sampling.n is {n}"))
        return ()
    stops = message.stopping.stop_token_ids
    if len(stops) > model.engine.config.max_stops:  # the engine refuses them
        return ()
    ends = set(stops) | (frozenset() if message.stopping.ignore_eos else model.engine.eos_token_ids)
    outputs: dict[int, ReceivedOutput] = {}
    for i, output in enumerate(asked.outputs):
        field, num_tokens = f"resume.outputs[{i}]", len(output.token_ids)
        if num_tokens > most:
            found.append(Violation(f"{field}.token_ids", f"has {num_tokens} tokens; the limit is {most}"))
            return ()
        found += _violations(field, output, n, outputs)
        outputs[output.index] = _received(output, ends, most)
    return tuple(outputs.get(index, NOTHING_RECEIVED) for index in range(n))


def _violations(field: str, output: pb.ReceivedOutput, n: int, others: dict[int, ReceivedOutput]) -> list[Violation]:
    found = []
    if output.index >= n or output.index in others:
        problem = "is there twice" if output.index in others else f"is {output.index}; expected 0 to {n - 1}"
        found.append(Violation(f"{field}.index", problem))
    if output.token_ids and output.num_tokens:
        problem = f"is {output.num_tokens}, and there are token_ids; expected one of the two"
        found.append(Violation(f"{field}.num_tokens", problem))
    return found


def _received(output: pb.ReceivedOutput, ends: set[int], most: int) -> ReceivedOutput:
    """Convert one output. `ends`: the tokens that end it by their ids. `most`: tokens that the context has."""
    tokens = tuple(output.token_ids)
    return ReceivedOutput(
        token_ids=tokens,
        ended_by_id=bool(tokens) and tokens[-1] in ends,
        # With a digest, sent tokens are compared with it as computed ones are.
        num_tokens=min(output.num_tokens or (len(tokens) if output.digest or output.recount else 0), most),
        digest=output.digest,
        tail=output.tail,
        has_ended=output.finished and not output.recount,
        recount=output.finished and output.recount,
    )


def emitted_outputs(received: Sequence[ReceivedOutput]) -> tuple[EmittedOutput, ...]:
    """Return what the engine is told of each output; none if there is nothing to tell."""
    emitted = tuple(EmittedOutput(token_ids=o.token_ids, has_ended=o.has_ended) for o in received)
    return emitted if any(o.token_ids or o.has_ended for o in emitted) else ()


def require_fit(received: Sequence[ReceivedOutput], grammar: Grammar) -> Iterator[None]:
    """Check, in parts, that the tokens that were received have the structure of the request. Raises InvalidRequest."""
    for index, output in enumerate(received):
        field, state = f"resume.outputs[{index}].token_ids", grammar.start()
        for start in range(0, len(output.token_ids), GRAMMAR_TOKENS):
            part = output.token_ids[start : start + GRAMMAR_TOKENS]
            try:
                taken = state.advance(part)
            except GrammarFault as fault:
                raise InvalidRequest.of(field, str(fault)) from fault
            if taken < len(part):
                raise InvalidRequest.of(
                    f"{field}[{start + taken}]", f"is {part[taken]}, which does not fit the structure"
                )
            yield


class EventIds:
    """The ids of a stream's events: each names all that was sent up to its event. `resume`: what was sent before.

    Example: "9f3a…-17-0-1c:77e0aa51c0d3e9b2,5!" is of a model's fingerprint and the seed 17, never interrupted;
    28 tokens of output 0, with their digest; output 1 has ended.
    """

    def __init__(self, resume: pb.Resume | None = None) -> None:
        before = pb.Resume() if resume is None else resume
        self._times = min(before.interruptions + (resume is not None), MAX_INTERRUPTIONS)
        self._outputs = {output.index: pb.ReceivedOutput() for output in before.outputs}
        for output in before.outputs:
            self._outputs[output.index].CopyFrom(output)
        self._prefix = ""

    @property
    def newest(self) -> str:
        every = range(max(self._outputs) + 1)
        return f"{self._prefix}-{','.join(_entry(self._outputs.get(index)) for index in every)}"

    def observe(self, message: pb.GenerateStreamResponse) -> bool:
        """Include a message; return whether it is an end that the caller has received before."""
        if message.HasField("resume_info"):
            self._prefix = f"{message.resume_info.fingerprint}-{message.resume_info.seed}-{self._times}"
        part = message.finished if message.HasField("finished") else message.delta
        output = self._outputs.setdefault(part.index, pb.ReceivedOutput())
        if message.HasField("finished"):
            is_known, output.finished = output.finished, True
            return is_known
        output.num_tokens += len(message.delta.token_ids)
        output.digest = message.delta.digest or output.digest
        output.tail = len(message.delta.text) > sum(message.delta.text_lengths)
        return False


def _entry(output: pb.ReceivedOutput | None) -> str:
    if output is None:
        return "0"
    digest = f":{output.digest}" if output.digest else ""
    return f"{output.num_tokens:x}{digest}{'+' * output.tail}{'!' * output.finished}"


def parse_event_id(event_id: str, max_n: int) -> tuple[int, pb.Resume]:
    """Return the seed and the resumption that an event's id names. Raises InvalidRequest if it is no such id.

    `max_n`: the most outputs that a stream of this server has.
    """
    whole = None if event_id.count(",") >= max_n else _EVENT_ID.fullmatch(event_id)
    parts = [] if whole is None else [_OUTPUT.fullmatch(part) for part in whole["outputs"].split(",")]
    has_digests = all(part is None or (int(part["count"], 16) > 0) == (part["digest"] is not None) for part in parts)
    if whole is None or None in parts or int(whole["seed"]) > MAX_SEED or not has_digests:
        raise InvalidRequest.of("Last-Event-ID", f"is {shown(event_id)}; expected the id of an event of this server")
    outputs = [
        pb.ReceivedOutput(
            index=index,
            num_tokens=int(part["count"], 16),
            digest=part["digest"] or "",
            tail=part["tail"] is not None,
            finished=part["end"] is not None,
        )
        for index, part in enumerate(parts)
        if part is not None
    ]
    resume = pb.Resume(fingerprint=whole["fingerprint"], outputs=outputs, interruptions=int(whole["times"]))
    return int(whole["seed"]), resume
