"""What can be wrong with a request, each with the field and the value. Knows the model's limits and no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from engine.errors import Violation
from engine.types import MAX_NUM_DRAFT, MAX_SEED, Request, SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_N = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_SALT_LENGTH = 256  # characters


def violations(request: Request, vocab_size: int, max_model_len: int) -> Iterator[Violation]:
    """Everything wrong with a request; `vocab_size` is the width of the logits."""
    sampling = request.sampling
    yield from _number_violations(sampling)
    yield from _count_violations(sampling)
    yield from _stop_violations(sampling)
    yield from _prompt_violations(request, vocab_size, max_model_len)
    yield from _token_violations(sampling, vocab_size)
    yield from _guided_violations(request)
    wanted = request.speculation.num_draft_tokens
    if wanted is not None and not 0 <= wanted <= MAX_NUM_DRAFT:
        yield Violation("speculation.num_draft_tokens", f"is {wanted}; expected 0 to {MAX_NUM_DRAFT}")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_LENGTH:
        yield Violation("cache_salt", f"has {len(request.cache_salt)} characters; expected 1 to {MAX_SALT_LENGTH}")


def _number_violations(sampling: SamplingParams) -> Iterator[Violation]:
    limits = {  # field: least, most, whether the least itself is too little
        "temperature": (0.0, 100.0, False),
        "top_p": (0.0, 1.0, True),
        "min_p": (0.0, 1.0, False),
        "repetition_penalty": (0.0, 10.0, True),
        "presence_penalty": (-2.0, 2.0, False),
        "frequency_penalty": (-2.0, 2.0, False),
    }
    for name, (least, most, is_open) in limits.items():
        value = getattr(sampling, name)
        # Said as what must hold, not as what must not: every comparison with a NaN is false.
        if not (least <= value <= most and not (is_open and value == least)):
            expected = f"above {least:g}, up to {most:g}" if is_open else f"{least:g} to {most:g}"
            yield Violation(f"sampling.{name}", f"is {value}; expected {expected}")


def _count_violations(sampling: SamplingParams) -> Iterator[Violation]:
    counts = {  # field: value, least, most
        "sampling.top_k": (sampling.top_k, 0, None),
        "sampling.seed": (sampling.seed, 0, MAX_SEED),
        "sampling.n": (sampling.n, 1, MAX_N),
        "stopping.max_tokens": (sampling.max_tokens, 1, None),
        "stopping.min_tokens": (sampling.min_tokens, 0, None),
        "output.top_logprobs": (sampling.logprobs, 0, MAX_LOGPROBS),
        "output.prompt_logprobs": (sampling.prompt_logprobs, 0, MAX_LOGPROBS),
    }
    for name, (value, least, most) in counts.items():
        if value is not None and not (least <= value and (most is None or value <= most)):
            yield Violation(name, f"is {value}; expected {least} {'or more' if most is None else f'to {most}'}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        yield Violation("stopping.min_tokens", f"is {sampling.min_tokens}; max_tokens is {sampling.max_tokens}")


def _stop_violations(sampling: SamplingParams) -> Iterator[Violation]:
    if len(sampling.stop) > MAX_STOPS:
        yield Violation("stopping.stop", f"has {len(sampling.stop)} strings; the limit is {MAX_STOPS}")
    if len(sampling.stop_token_ids) > MAX_STOPS:
        yield Violation("stopping.stop_token_ids", f"has {len(sampling.stop_token_ids)} ids; the limit is {MAX_STOPS}")
    for i, text in enumerate(sampling.stop[:MAX_STOPS]):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            yield Violation(f"stopping.stop[{i}]", f"has {len(text)} characters; expected 1 to {MAX_STOP_LENGTH}")


def _prompt_violations(request: Request, vocab_size: int, max_model_len: int) -> Iterator[Violation]:
    length, sampling = len(request.token_ids), request.sampling
    room = max_model_len - length
    if not length:
        yield Violation("prompt", "is empty: there is nothing to continue")
    if room < 1:
        yield Violation("prompt", f"has {length} tokens; the limit is {max_model_len - 1}")
    for name, wanted in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
        if room >= 1 and wanted is not None and wanted > room:
            problem = f"is {wanted}; after {length} prompt tokens the context has room for {room}"
            yield Violation(f"stopping.{name}", problem)
    yield from _unknown("token_ids", request.token_ids, vocab_size)


def _token_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[Violation]:
    yield from _unknown("stopping.stop_token_ids", sampling.stop_token_ids, vocab_size)
    yield from _unknown("sampling.banned_token_ids", sampling.banned_token_ids, vocab_size)
    yield from _unknown("sampling.logit_bias", sampling.logit_bias, vocab_size)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        yield Violation("sampling.logit_bias", f"has {len(sampling.logit_bias)} tokens; the limit is {MAX_LOGIT_BIAS}")
    for token, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100 or math.isnan(bias):
            yield Violation(f"sampling.logit_bias[{token}]", f"is {bias}; expected -100 to 100")
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        yield from _unknown("sampling.allowed_token_ids", allowed, vocab_size)
        if not set(allowed) - set(sampling.banned_token_ids):
            yield Violation("sampling.allowed_token_ids", f"has {len(allowed)} ids, none of them not banned")


def _unknown(field: str, tokens: Iterable[int], vocab_size: int) -> Iterator[Violation]:
    """The first id that the model does not know; one is enough: a wrong tokenizer gets them all wrong."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            yield Violation(f"{field}[{i}]", f"is {token}; expected 0 to {vocab_size - 1}")
            return


def _guided_violations(request: Request) -> Iterator[Violation]:
    guided = request.sampling.guided
    if guided is None:
        return
    if request.sampling.ignore_eos:
        yield Violation("stopping.ignore_eos", "is true; a guided output ends where its structure ends")
    kinds: Seq[object] = (guided.json_schema, guided.regex, guided.grammar, guided.choice)
    if sum(kind is not None for kind in kinds) != 1:
        yield Violation("guided", "has several kinds or none; expected one of json_schema, regex, grammar, choice")
