"""Validates a request: fills in defaults, and raises all violations in one error.

Independent of protocol, network and time.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from pilotfish.engine.errors import ContextExcess, InvalidRequest, Unsupported, Violation, shown
from pilotfish.engine.params import MAX_SEED, Guided, Verification
from pilotfish.engine.request.validation import most_prompt_tokens
from pilotfish.engine.types import Request
from pilotfish.server.admission.conversation import answer_of, text_of_conversation
from pilotfish.server.chat import Conversation
from pilotfish.server.errors import NotFound, ResumeRefused
from pilotfish.server.formats.structure import Answer, structure_of
from pilotfish.server.model import ServedModel

Prompt: TypeAlias = str | Conversation | None  # None: the request already contains the tokens of its prompt

NO_TOKENS = (0,)  # replaces an unusable prompt, so that the rest of the request can be checked
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def require_model(name: str | None, model: ServedModel) -> None:
    """Raise NotFound unless `name` is the served model, one of its adapters, or None."""
    if name is not None and name != model.name and name not in model.engine.adapters:
        known = ", ".join(map(repr, [model.name, *sorted(model.engine.adapters)]))
        raise NotFound(f"model is {shown(name)}; this server has {known}")


def text_of(prompt: Prompt, request: Request, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the text to encode: the prompt, or the conversation rendered by the chat template.

    None if there is none, or if it cannot be used; violations of its length and of the template are added to `found`.
    Raises NotFound if the request names another model.
    """
    require_model(request.model, model)
    is_chat = isinstance(prompt, Conversation)
    if prompt is None or model.codec is None or (is_chat and model.chat is None):
        return None
    try:
        text = text_of_conversation(prompt, model) if isinstance(prompt, Conversation) else prompt
    except InvalidRequest as invalid:
        found += invalid.violations
        return None
    most = most_prompt_tokens(model.engine.config, model.engine.facts.limits.max_model_len)
    if problem := model.codec.excess(text, most):
        excess = ContextExcess(
            model.engine.facts.limits.max_model_len, model.codec.least_tokens(text), most, is_bound=True
        )
        found.append(Violation("messages" if is_chat else "prompt", problem, excess))
        return None
    return text


def prediction_of(text: str | None, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the text of a prediction to encode; None if there is none, or if it cannot be used."""
    if text is None:
        return None
    if model.codec is None:
        found.append(Violation("prediction.text", "is text, and the model has no tokenizer; send token_ids"))
        return None
    if problem := model.codec.excess(text, model.engine.facts.limits.max_model_len):
        found.append(Violation("prediction", problem))
        return None
    return text


def checked(
    request: Request, prompt: Prompt, text: str | None, model: ServedModel, known: Iterable[Violation] = ()
) -> tuple[Request, Answer | None]:
    """Return the request with all defaults filled in, and the constraints on the answer of a conversation.

    The request already contains the tokens of a prompt or prediction that was text; `text` is that of the prompt.
    Compiles no structure.

    Raises:
        NotFound: the adapter that the request names is not loaded.
        InvalidRequest: the request is invalid; the error lists all violations, including those in `known`.
        Unsupported: this server or model lacks features that the request needs; the error lists all of them.
        ResumeRefused: the request continues a stream of another model.
    """
    found, unsupported, answer = list(known), list[str](), None
    found += _violations(request, prompt, model)
    request = _complete(request, prompt, text, model, found)
    if request.sampling.guided is not None and model.compile_grammar is None:
        unsupported.append("guided decoding is not available for this model")
    try:
        if isinstance(prompt, Conversation):
            request, answer = _with_answer(request, prompt, model, text)
    except InvalidRequest as invalid:
        found += invalid.violations
    except Unsupported as error:
        unsupported.append(str(error))
    try:
        model.engine.check(request)
    except InvalidRequest as invalid:
        # The engine has separate counts of top log-probabilities for output and prompt; the API has one.
        names = {"output.prompt_logprobs": "output.top_logprobs"}
        found += (replace(v, field=names.get(v.field, v.field)) for v in invalid.violations)
    except Unsupported as error:
        unsupported.append(str(error))
    if found:
        raise InvalidRequest(dict.fromkeys(found))
    if unsupported:
        raise Unsupported("; ".join(unsupported))
    return request, answer


def _violations(request: Request, prompt: Prompt, model: ServedModel) -> Iterator[Violation]:
    """Yield violations that depend on tokenizer or chat template; the engine checks all other fields."""
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        yield Violation("request_id", f"is {shown(request.request_id)}; expected 1 to 128 of A-Z a-z 0-9 . _ : -")
    if isinstance(prompt, str) and model.codec is None:
        yield Violation("prompt", "is text, and the model has no tokenizer; send token_ids")
    if isinstance(prompt, Conversation) and (model.chat is None or model.codec is None):
        yield Violation("messages", "is a conversation, and the model has no chat template; send prompt")
    if request.sampling.stop and model.codec is None:
        yield Violation("stopping.stop", "is text, and the model has no tokenizer; use stop_token_ids")


def _complete(
    request: Request, prompt: Prompt, text: str | None, model: ServedModel, found: list[Violation]
) -> Request:
    """Fill in id, seed, model and adapter.

    A resumed request may name a proposer that only another server has: it is dropped, because under coupled
    verification no token depends on it.
    """
    adapter = _adapter_of(request, model, found)
    sampling, speculation, output = request.sampling, request.speculation, request.output
    if request.resume is not None:
        fingerprint = model.fingerprint_with(adapter)
        if request.resume.fingerprint != fingerprint:
            theirs = f"resume.fingerprint is {shown(request.resume.fingerprint)}"
            raise ResumeRefused(f"{theirs}; the one of {model.name} here is {fingerprint!r}")
        is_unknown = speculation.proposer not in model.engine.facts.proposer_names
        if is_unknown and speculation.verification is Verification.COUPLED:
            speculation = replace(speculation, proposer=None)
    elif sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))
    if output.skip_special_tokens is None:  # they may mark calls and reasoning
        shows = isinstance(prompt, Conversation) and bool(model.format.special)
        output = replace(output, skip_special_tokens=not shows)
    return replace(
        request,
        request_id=request.request_id or secrets.token_hex(12),
        token_ids=NO_TOKENS if prompt is not None and text is None else request.token_ids,
        model=adapter or model.name,
        adapter=adapter,
        sampling=sampling,
        speculation=speculation,
        output=output,
    )


def _adapter_of(request: Request, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the adapter that a request names, also as its model; None for the model itself. Raises NotFound."""
    name = request.adapter
    if name is not None and name not in model.engine.adapters:
        known = ", ".join(map(repr, sorted(model.engine.adapters))) or "none"
        raise NotFound(f"adapter is {shown(name)}; this server has {known}")
    of_model = None if request.model == model.name else request.model
    if None not in (name, of_model) and name != of_model:
        found.append(Violation("adapter", f"is {shown(name)}, and model is {shown(of_model)}; expected the same"))
    return name or of_model


def _with_answer(
    request: Request, asked: Conversation, model: ServedModel, text: str | None
) -> tuple[Request, Answer | None]:
    answer = answer_of(asked, request.sampling.guided, model, text)
    try:
        guided = structure_of(answer, model.format)
    except (ValueError, RecursionError) as error:  # the schema of a strict tool that the format of calls cannot express
        raise InvalidRequest.of("messages.tools", f"is not supported in this model's call format: {error}") from error
    size = 0 if guided is None or guided == answer.content else len((guided.grammar or "").encode())
    most = model.engine.config.max_structure_bytes
    if size > most:
        field = "messages.tools" if answer.tools else "guided"
        raise InvalidRequest.of(field, f"make a structure of {size} bytes; the limit is {most}")
    return with_structure(request, guided), answer


def with_structure(request: Request, guided: Guided | None) -> Request:
    """Return the same request with another structure."""
    return replace(request, sampling=replace(request.sampling, guided=guided))
