"""Prompts to tokens and back: `/tokenize` and `/detokenize`, as in vLLM, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pilotfish.engine.errors import InvalidRequest, Unsupported, Violation
from pilotfish.engine.request.validation import unknown_ids
from pilotfish.engine.text.codec import Codec
from pilotfish.server.admission.admission import Admission
from pilotfish.server.admission.check import require_model
from pilotfish.server.admission.slow_work import release_turn
from pilotfish.server.chat import Conversation
from pilotfish.server.http.bodies import Input, ParsedBody
from pilotfish.server.http.fields import Body, Flag, Ids, Text
from pilotfish.server.http.messages import ConversationBody
from pilotfish.server.http.openai.bodies import ChatBody, ChatTurns
from pilotfish.server.model import ServedModel


class TokenizeBody(ChatBody):
    """Body of `POST /tokenize`: a prompt, or a conversation as in a chat completion. Further fields have no effect."""

    no_input = None
    names: ClassVar = {name: theirs for name, theirs in ChatBody.names.items() if name != "prompt"}

    messages: ChatTurns = []  # noqa: RUF012  # pydantic copies it
    prompt: Text | None = None
    add_special_tokens: Flag | None = None  # default: only for a prompt, because a chat template writes them
    return_token_strs: Flag = False

    @property
    def prompts(self) -> list[Input]:
        return super().prompts if self.prompt is None else [self.prompt]

    def conflicts(self) -> Iterator[Violation]:
        yield from super().conflicts()
        if "messages" in self.model_fields_set and self.prompt is not None:
            yield Violation("body", "has prompt and messages; expected one of them")
        elif "messages" not in self.model_fields_set and self.prompt is None:
            yield Violation("body", "has neither prompt nor messages")


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: Text | None = None
    tokens: Ids


async def tokenized(admission: Admission, read: ParsedBody[TokenizeBody]) -> Any:
    """Return the tokens of a prompt, their number and, on request, their entries in the vocabulary."""
    model, is_text = admission.driver().model, read.body.prompt is not None
    bare = not (is_text if read.body.add_special_tokens is None else read.body.add_special_tokens)
    tokens = await _tokens(admission, read, model, bare=bare)
    named = None
    if read.body.return_token_strs:
        named = await admission.slow.run(_named, _require_codec(model), tokens, is_slow=True)
    most = model.engine.facts.limits.max_model_len
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": named}


async def counted(admission: Admission, read: ParsedBody[ConversationBody]) -> Any:
    """Return the number of tokens, in Anthropic's format."""
    return {"input_tokens": len(await _tokens(admission, read, admission.driver().model, bare=True))}


async def _tokens(
    admission: Admission, read: ParsedBody[Any], model: ServedModel, *, bare: bool
) -> tuple[int, ...]:  # fmt: skip
    codec, found = _require_codec(model), list[Violation]()
    request, prompt, _ = read.readers[0](model, found)
    if isinstance(prompt, Conversation) and model.chat is None:
        raise Unsupported(f"{model.name} does not support conversations: it has no chat template")
    text = await admission.text_of(prompt, request, model, found)
    if text is None or found:
        with read.naming():
            raise InvalidRequest(found)
    release_turn()
    return await admission.encoded(text, codec, bare=bare)


async def detokenized(admission: Admission, body: DetokenizeBody) -> Any:
    """Return the text of tokens, special ones included."""
    model = admission.driver().model
    require_model(body.model, model)
    codec, limits = _require_codec(model), model.engine.facts.limits
    if len(body.tokens) > limits.max_model_len:
        raise InvalidRequest.of("tokens", f"has {len(body.tokens)} ids; the limit is {limits.max_model_len}")
    if unknown := list(unknown_ids("tokens", body.tokens, limits.vocab_size)):
        raise InvalidRequest(unknown)
    return {"prompt": await admission.slow.run(_text, codec, body.tokens)}


def _text(codec: Codec, tokens: list[int]) -> str:
    return codec.decode(tokens, skip_special_tokens=False)


def _named(codec: Codec, tokens: tuple[int, ...]) -> list[str | None]:
    return [codec.tokenizer.id_to_token(token) for token in tokens]


def _require_codec(model: ServedModel) -> Codec:
    if model.codec is None:
        raise Unsupported(f"{model.name} has no tokenizer; it supports token ids only")
    return model.codec
