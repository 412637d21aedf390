"""Everything a caller may ask of a generation, written once for all four generating methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict, TypeVar, get_type_hints

from pilotfish.v1 import generation_pb2 as pb

# A server that was not there yet is tried again within a second; gRPC would let two minutes pass.
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))

SpeculationMode = Literal["auto", "off", "fixed"]
Verification = Literal["coupled", "rejection"]
Prompt = str | Sequence[int]
RequestT = TypeVar("RequestT", pb.GenerateRequest, pb.GenerateStreamRequest)


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, named as in the protocol, which tells units and defaults.

    What is left out takes the server's default. `speculation` is `speculation.mode` there.
    """

    request_id: str | None
    model: str | None
    priority: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    stream_interval: int | None
    speculation: SpeculationMode | None
    num_draft_tokens: int | None
    proposer: str | None
    verification: Verification | None


_NAMES = frozenset(get_type_hints(Options))


def build_request(kind: type[RequestT], prompt: Prompt, options: Options) -> RequestT:
    """The message that asks for a continuation of `prompt`, which is text or token ids."""
    if unknown := options.keys() - _NAMES:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = kind(
        request_id=options.get("request_id"),
        model=options.get("model"),
        priority=options.get("priority"),
        sampling=_sampling(options),
        stopping=_stopping(options),
        output=pb.OutputOptions(stream_interval=options.get("stream_interval")),
        speculation=_speculation(options),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return request


def _sampling(options: Options) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        seed=options.get("seed"),
    )


def _stopping(options: Options) -> pb.StoppingParams:
    stop = options.get("stop", ())
    if isinstance(stop, str):
        raise TypeError(f"stop is the string {stop!r}; expected a list of strings")  # or each character would stop
    return pb.StoppingParams(
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens"),
        stop=stop,
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos"),
    )


def _speculation(options: Options) -> pb.SpeculationOptions:
    mode, verification = options.get("speculation"), options.get("verification")
    return pb.SpeculationOptions(
        mode=pb.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}") if mode else None,
        num_draft_tokens=options.get("num_draft_tokens"),
        proposer=options.get("proposer"),
        verification=pb.Verification.Value(f"VERIFICATION_{verification.upper()}") if verification else None,
    )
