"""Field types and base class of HTTP bodies, for all routes.

Unknown fields are refused by name, because most would change the output. A null field counts as missing. So does an
unsupported field of OpenAI or other servers if its value has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from pilotfish.engine.errors import shown
from pilotfish.engine.params import MAX_SEED, MIN_SEED


def _is_text(value: str) -> str:
    r"""Refuse text with half of a surrogate pair (`\ud800`), which JSON can contain but UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has {value[error.start]!r} at {error.start}, which is not a valid character") from None
    return value


# Strict types: "3" and true are not accepted as numbers, and 1 is not accepted as a boolean.
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)]
# 64 bits, unsigned in the protocol: -1 and 2**64 - 1 are the same seed.
Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED, strict=True), AfterValidator(lambda seed: seed & MAX_SEED)]
TokenKey = Annotated[int, Field(ge=0, le=2**32 - 1)]  # a JSON object's key, which is a string; so not strict
Real = Annotated[float, Field(strict=True)]
Seconds = Annotated[float, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, AfterValidator(_is_text)]

# Lists and objects are counted before their entries are validated; validation stops at a list's first invalid entry.
MAX_FIELDS = 100  # of an object with known fields
MAX_PARTS = 1024  # of a message
MAX_TEXTS = 1024  # text parts of a message; stop strings, for which the server has a lower limit
MAX_CHOICES = 65_536
MAX_PROMPTS = 128
MAX_BIASES = 16_384
MAX_IDS = 1 << 20
MAX_SCHEMA = 1 << 20  # characters and values; the server's limit is lower
MAX_DEPTH = 128  # of a schema


def at_most(most: int) -> BeforeValidator:
    """Return a validator that rejects lists and objects with more entries, before validating the entries."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"has {len(value)} entries; the limit is {most}")
        return value

    return BeforeValidator(check)


def _is_schema(value: dict[str, Any]) -> dict[str, Any]:
    """Reject a schema that is too large or too deep for any server, or contains half of a surrogate pair."""
    level, left = list[Any]([value]), MAX_SCHEMA
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += part.keys()
                inner += part.values()
            elif isinstance(part, list):
                inner += part
            elif isinstance(part, str):
                left -= len(_is_text(part))
        left -= len(inner)
        if left < 0:
            raise ValueError(f"has more than {MAX_SCHEMA} characters and values")
        if not inner:
            return value
        level = inner
    raise ValueError(f"has more than {MAX_DEPTH} levels")


Schema = Annotated[dict[str, Any], AfterValidator(_is_schema)]
Ids = Annotated[list[UInt32], Field(fail_fast=True), at_most(MAX_IDS)]
Texts = Annotated[list[Text], Field(fail_fast=True), at_most(MAX_TEXTS)]

# Fields about the caller, not about the output: they are accepted and have no effect.
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "refusal"})
IGNORED |= {"prompt_cache_key", "prompt_cache_retention"}
# Values of unsupported fields that have no effect.
NEUTRAL: dict[str, Any] = {
    "annotations": [],
    "background": False,
    "best_of": 1,
    "echo": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "suffix": "",
    "top_logprobs": 0,
    "use_beam_search": False,
}


def goes_with(kind: str, field: str, name: str = "") -> Any:
    """Return a validator of a body: `field` (in the API `name`) must be set for type `kind` and for no other."""

    def check(body: Any) -> Any:
        if (body.type == kind) != (getattr(body, field) is not None):
            raise ValueError(f"is of type {body.type!r}; {name or field} goes with the type {kind} and with no other")
        return body

    return model_validator(mode="after")(check)


def text_of(content: Any, separator: str = "") -> str:
    """Return the whole text of a content, which is a string or a list of parts; "" if there is none."""
    return content or "" if isinstance(content, str | None) else separator.join(part.text for part in content)


def not_served(advice: str) -> BeforeValidator:
    """Return a validator of a field that is not supported: any value is refused, with advice."""

    def refuse(value: Any) -> Any:
        given = f"is {shown(value)}" if isinstance(value, str) else "is set"  # other values can have any size
        raise ValueError(f"{given}; this field is not supported: {advice}")

    return BeforeValidator(refuse)


class Body(BaseModel):
    """Base of all parts of a body. It drops null fields and fields without effect, and refuses unknown ones."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()  # further ignored fields, with any value

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        if len(found) > MAX_FIELDS:
            raise ValueError(f"has {len(found)} fields; the limit is {MAX_FIELDS}")
        fields, ignored = cls.model_fields, IGNORED | cls.ignored
        return {
            name: value
            for name, value in found.items()
            if not (value is None or _is_neutral(name, value)) and (name in fields or name not in ignored)
        }


def _is_neutral(name: str, value: Any) -> bool:
    return name in NEUTRAL and type(value) is type(NEUTRAL[name]) and value == NEUTRAL[name]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Selects a type of a union by a value: `which` returns its index. So errors concern only this type."""

    which: Callable[[Any], int]

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _union([handler.generate_schema(kind) for kind in get_args(union)], self.which)


def _union(schemas: list[CoreSchema], which: Callable[[Any], int]) -> CoreSchema:
    """Return the schema of a union, with tags that errors omit from a field's path."""
    return core_schema.tagged_union_schema(
        {f"<{i}>": schema for i, schema in enumerate(schemas)}, lambda value: f"<{which(value):d}>"
    )


TEXT_OR_LIST = OneOf(lambda value: isinstance(value, list))
TEXT_OR_OBJECT = OneOf(lambda value: isinstance(value, dict))


@dataclass(frozen=True, slots=True)
class ByType:
    """Selects a body, or one of a union, by an object's field `type`, and rejects other types.

    `default` is the type if it is missing.
    """

    default: Callable[[dict[str, Any]], str | None] = lambda _: None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = get_args(union) or (union,)
        names = [get_args(kind.model_fields["type"].annotation) for kind in kinds]
        numbers = {name: i for i, some in enumerate(names) for name in some}

        def check(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            found = self.default(value) if value.get("type") is None else value["type"]
            if not isinstance(found, str):
                raise ValueError(f"has no type; expected {' or '.join(numbers)}")  # noqa: TRY004  # for pydantic
            if found not in numbers:
                raise ValueError(f"is of type {shown(found)}, which is not supported; expected {' or '.join(numbers)}")
            return value | {"type": found}

        def which(value: Any) -> int:
            return numbers[value["type"]] if isinstance(value, dict) else 0

        union_of = _union([handler.generate_schema(kind) for kind in kinds], which)
        return core_schema.no_info_before_validator_function(check, union_of)
