"""Fields that bodies of the agents' protocols share, and how their parts are told apart by type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from pydantic import BeforeValidator, Discriminator, Tag

from engine.errors import Violation, shown
from server.http.fields import Body
from server.http.types import GenerationFields

Json = dict[str, Any]
Ignored: TypeAlias = Any  # type of a field that has no effect on the output, whatever it is
MAX_PARTS = 1024  # of a message


class AgentBody(GenerationFields):
    """A body of these routes: fields of the protocol in question, and those of `GenerationFields`."""

    def conflicts(self) -> Iterator[Violation]:
        """Yield a violation for fields that are valid by themselves but exclude each other, or are not served here."""
        yield from super().conflicts()
        if self.event_ids:
            yield Violation("event_ids", "is True; a stream of this route cannot be continued")


def _kind(value: Any) -> str:
    return "list[part]" if isinstance(value, list) else "str"


# Tells a text from a list of parts. The tags are names that errors leave out of a field's path.
TEXT_OR_PARTS = Discriminator(_kind)
TEXT, PARTS = Tag("str"), Tag("list[part]")
_tags = set[str]()  # types of parts, which pydantic adds to the path of a part's field


def of_types(kinds: Sequence[type[Body]], default: Callable[[Json], str | None] = lambda _: None) -> BeforeValidator:
    """Refuse an object whose field `type` is none of `kinds` have; `default` gives the type where it is missing."""
    known = [name for kind in kinds for name in _types(kind)]
    _tags.update(known)

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = value.get("type")
        if found is None:
            found = default(value)
            value = value if found is None else value | {"type": found}
        if found is None:
            raise ValueError(f"has no type; expected {' or '.join(known)}")
        if found not in known:
            raise ValueError(f"is of type {shown(found)}, which is not served; expected {' or '.join(known)}")
        return value

    return BeforeValidator(check)


def _types(kind: type[Body]) -> Sequence[str]:
    """Return the values of a literal field `type`."""
    return kind.model_fields["type"].annotation.__args__  # type: ignore[union-attr, no-any-return]


def without_tags(path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """("input", 0, "message", "role") -> ("input", 0, "role"); a field that has the name of a type stays."""
    inner = range(1, len(path) - 1)
    tags = {i for i in inner if path[i] in _tags and isinstance(path[i - 1], int)}
    return tuple(part for i, part in enumerate(path) if i not in tags)
