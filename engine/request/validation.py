"""Validation of a request: each violation names field and value. Independent of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from pilotfish.engine.errors import ContextExcess, Violation, shown
from pilotfish.engine.params import MAX_NUM_DRAFT, MAX_SEED, MIN_SEED, Guided, SamplingParams
from pilotfish.engine.types import Request

if TYPE_CHECKING:  # only for types: without pydantic the class differs
    from pilotfish.engine.config import Bounds

MAX_SALT_LENGTH = 256  # characters
MAX_PRIORITY = 100
STRUCTURES = ("json_schema", "regex", "grammar", "choice")


def violations(request: Request, bounds: Bounds, vocab_size: int, max_model_len: int) -> Iterator[Violation]:
    """All violations of a request; `vocab_size` is the width of the logits."""
    sampling = request.sampling
    yield from _value_violations(sampling, bounds)
    yield from _stop_violations(sampling, bounds)
    yield from _prompt_violations(request, bounds, max_model_len)
    yield from unknown_ids("token_ids", request.token_ids, vocab_size)
    yield from _token_violations(sampling, bounds, vocab_size)
    yield from _logprob_violations(request, bounds, max_model_len)
    if sampling.guided is not None:
        yield from _guided_violations(sampling, bounds)
    yield from _prediction_violations(request.prediction, vocab_size, max_model_len)
    wanted = request.speculation.num_draft_tokens
    if wanted is not None and not 0 <= wanted <= MAX_NUM_DRAFT:
        yield Violation("speculation.num_draft_tokens", f"is {wanted}; expected 0 to {MAX_NUM_DRAFT}")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        yield Violation("priority", f"is {request.priority}; expected {-MAX_PRIORITY} to {MAX_PRIORITY}")
    if request.output.stream_interval < 1:
        yield Violation("output.stream_interval", f"is {request.output.stream_interval}; expected 1 or more")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_LENGTH:
        yield Violation("cache_salt", f"has {len(request.cache_salt)} characters; expected 1 to {MAX_SALT_LENGTH}")


def unknown_adapter(name: str | None, loaded: Iterable[str]) -> Iterator[Violation]:
    """Report an adapter that is not loaded, with the loaded ones."""
    known = sorted(loaded)
    if name is not None and name not in known:
        there = f"expected one of {', '.join(map(shown, known))}" if known else "none is loaded"
        yield Violation("adapter", f"is {shown(name)}; {there}")


def _value_violations(sampling: SamplingParams, bounds: Bounds) -> Iterator[Violation]:
    values = {  # field: value, minimum, maximum
        "sampling.temperature": (sampling.temperature, 0, 100),
        "sampling.top_p": (sampling.top_p, 0, 1),
        "sampling.min_p": (sampling.min_p, 0, 1),
        "sampling.repetition_penalty": (sampling.repetition_penalty, 0.01, 10),  # less makes logits infinite
        "sampling.presence_penalty": (sampling.presence_penalty, -2, 2),
        "sampling.frequency_penalty": (sampling.frequency_penalty, -2, 2),
        "sampling.top_k": (sampling.top_k, 0, None),
        "sampling.seed": (sampling.seed, MIN_SEED, MAX_SEED),
        "sampling.n": (sampling.n, 1, bounds.max_n),
        "stopping.max_tokens": (sampling.max_tokens, 1, None if sampling.fit_context else bounds.max_output_tokens),
        "stopping.min_tokens": (sampling.min_tokens, 0, bounds.max_output_tokens),
        "output.top_logprobs": (sampling.logprobs, 0, bounds.max_logprobs),
        "output.prompt_logprobs": (sampling.prompt_logprobs, 0, bounds.max_logprobs),
    }
    for name, (value, least, most) in values.items():
        # Every comparison with a NaN is false.
        if value is not None and not (least <= value and (most is None or value <= most)):
            yield Violation(name, f"is {value}; expected {least} {'or more' if most is None else f'to {most}'}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        yield Violation("stopping.min_tokens", f"is {sampling.min_tokens}; max_tokens is {sampling.max_tokens}")


def _stop_violations(sampling: SamplingParams, bounds: Bounds) -> Iterator[Violation]:
    most, longest = bounds.max_stops, bounds.max_stop_length
    if len(sampling.stop) > most:
        yield Violation("stopping.stop", f"has {len(sampling.stop)} strings; the limit is {most}")
    if len(sampling.stop_token_ids) > most:
        yield Violation("stopping.stop_token_ids", f"has {len(sampling.stop_token_ids)} ids; the limit is {most}")
    for i, text in enumerate(sampling.stop[:most]):
        if not 1 <= len(text) <= longest:
            yield Violation(f"stopping.stop[{i}]", f"has {len(text)} characters; expected 1 to {longest}")


def _prompt_violations(request: Request, bounds: Bounds, max_model_len: int) -> Iterator[Violation]:
    length, sampling = len(request.token_ids), request.sampling
    room, most = max_model_len - length, most_prompt_tokens(bounds, max_model_len)
    if not length:
        yield Violation("prompt", "is empty")
    yield from prompt_too_long(length, bounds, max_model_len)
    max_tokens = None if sampling.fit_context else sampling.max_tokens
    for name, wanted in (("max_tokens", max_tokens), ("min_tokens", sampling.min_tokens)):
        if room >= 1 and wanted is not None and wanted > room:
            problem = f"is {wanted}; after {length} prompt tokens the context has room for {room}"
            yield Violation(f"stopping.{name}", problem, ContextExcess(max_model_len, length, most, wanted))


def most_prompt_tokens(bounds: Bounds, max_model_len: int) -> int:
    """Maximum number of tokens of a prompt."""
    return min(max_model_len - 1, bounds.max_prompt_tokens or max_model_len)


def prompt_too_long(length: int, bounds: Bounds, max_model_len: int) -> Iterator[Violation]:
    """Report a prompt of too many tokens."""
    most = most_prompt_tokens(bounds, max_model_len)
    if length > most:
        excess = ContextExcess(max_model_len, length, most)
        yield Violation("prompt", f"has {length} tokens; the limit is {most}", excess)


def _token_violations(sampling: SamplingParams, bounds: Bounds, vocab_size: int) -> Iterator[Violation]:
    yield from unknown_ids("stopping.stop_token_ids", sampling.stop_token_ids, vocab_size)
    yield from _set_violations("sampling.banned_token_ids", sampling.banned_token_ids, vocab_size)
    yield from unknown_ids("sampling.logit_bias", sampling.logit_bias, vocab_size, by_id=True)
    num_biased, most = len(sampling.logit_bias), bounds.max_logit_bias
    if num_biased > most:
        yield Violation("sampling.logit_bias", f"has {num_biased} tokens; the limit is {most}")
    for token, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            yield Violation(f"sampling.logit_bias[{token}]", f"is {bias}; expected -100 to 100")
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        yield from _set_violations("sampling.allowed_token_ids", allowed, vocab_size)
        if not set(allowed) - set(sampling.banned_token_ids):
            yield Violation("sampling.allowed_token_ids", f"has {len(allowed)} ids, all of which are banned")


def _set_violations(field: str, tokens: tuple[int, ...], vocab_size: int) -> Iterator[Violation]:
    if len(tokens) > vocab_size:
        yield Violation(field, f"has {len(tokens)} ids; the vocabulary has {vocab_size}")
    yield from unknown_ids(field, tokens, vocab_size)


def unknown_ids(field: str, tokens: Collection[int], vocab_size: int, *, by_id: bool = False) -> Iterator[Violation]:
    """Report only the first unknown id, because with a wrong tokenizer there are many."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            yield Violation(f"{field}[{token if by_id else i}]", f"is {token}; expected 0 to {vocab_size - 1}")
            return


def _logprob_violations(request: Request, bounds: Bounds, max_model_len: int) -> Iterator[Violation]:
    """Limit the total number of log-probabilities: prompt or output tokens times outputs times (1 + top tokens)."""
    sampling, most = request.sampling, bounds.max_total_logprobs
    num_tokens = sampling.max_tokens
    if num_tokens is None or sampling.fit_context:
        num_tokens = request.max_len(max_model_len, bounds.max_output_tokens) - len(request.token_ids)
    asked = {"output.logprobs": (sampling.logprobs, sampling.n * num_tokens)}
    asked["output.prompt_logprobs"] = (sampling.prompt_logprobs, len(request.token_ids))
    for field, (top, tokens) in asked.items():
        if top is not None and tokens * (1 + top) > most:
            yield Violation(field, f"requests {tokens * (1 + top)} log-probabilities; the limit is {most}")


def _prediction_violations(tokens: tuple[int, ...], vocab_size: int, max_model_len: int) -> Iterator[Violation]:
    if len(tokens) > max_model_len:
        yield Violation("prediction", f"has {len(tokens)} tokens; the limit is {max_model_len}")
    else:
        yield from unknown_ids("prediction.token_ids", tokens, vocab_size)


def _guided_violations(sampling: SamplingParams, bounds: Bounds) -> Iterator[Violation]:
    if sampling.ignore_eos:
        yield Violation("stopping.ignore_eos", "is true; not supported with guided decoding")
    assert sampling.guided is not None, "a request without a structure"
    yield from structure_violations(sampling.guided, bounds.max_structure_bytes, bounds.max_choices)


def structure_violations(guided: Guided, max_bytes: int, max_choices: int) -> Iterator[Violation]:
    """Violations of a structure that can be found without parsing, in linear time."""
    given = [name for name in STRUCTURES if getattr(guided, name) is not None]
    if not given and guided.thinking is not None:
        return
    if len(given) != 1:
        what = " and ".join(given) or "none"
        yield Violation("guided", f"has {what}; expected one of {', '.join(STRUCTURES)}")
        return
    texts = structure_texts(guided)
    num_choices = 1 if guided.choice is None else len(texts)
    if not 1 <= num_choices <= max_choices:
        yield Violation(structure_field(guided), f"has {num_choices} texts; expected 1 to {max_choices}")
        return
    total = 0
    for field, text in texts:
        try:
            total += len(text.encode())
        except UnicodeEncodeError as error:  # a lone surrogate
            yield Violation(field, f"has {text[error.start]!r} at {error.start}, which is not a valid character")
    if total > max_bytes:
        yield Violation(structure_field(guided), f"has {total} bytes; the limit is {max_bytes}")


def structure_texts(guided: Guided) -> list[tuple[str, str]]:
    """The source texts of a structure, each with its field."""
    if guided.choice is not None:
        return [(f"guided.choice[{i}]", text) for i, text in enumerate(guided.choice)]
    return [(structure_field(guided), guided.json_schema or guided.regex or guided.grammar or "")]


def structure_field(guided: Guided) -> str:
    """The name of the field that is set; the last one if none is set."""
    return "guided." + next((name for name in STRUCTURES if getattr(guided, name) is not None), STRUCTURES[-1])


FIELD = "resume.outputs"


def emitted_violations(request: Request, vocab_size: int, max_len: int) -> Iterator[Violation]:
    """All violations of `request.resume`; `max_len`: maximum number of tokens of prompt and output."""
    emitted, n = request.received, request.sampling.n
    if not emitted:
        return
    if len(emitted) != n:
        yield Violation(FIELD, f"has {len(emitted)} outputs; sampling.n is {n}")
    if request.sampling.seed is None:
        yield Violation("sampling.seed", "is missing; a resumed request requires the seed of the interrupted one")
    if all(output.has_ended for output in emitted):
        yield Violation(FIELD, f"has {len(emitted)} outputs, all finished; there is nothing to resume")
    room = max_len - len(request.token_ids)
    for index, output in enumerate(emitted):
        tokens = output.token_ids
        if len(tokens) > max(0, room):
            yield Violation(f"{FIELD}[{index}].token_ids", f"has {len(tokens)} tokens; the output has room for {room}")
        else:
            yield from unknown_ids(f"{FIELD}[{index}].token_ids", tokens, vocab_size)
