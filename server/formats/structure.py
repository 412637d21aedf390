"""The grammar of an answer: reasoning, then calls of functions or content. Composes the Lark rules of a chat format."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from pilotfish.engine.params import Guided, ThinkingBudget
from pilotfish.engine.text.guided import rule_of
from pilotfish.server.formats.base import ANY_OBJECT, ChatFormat, Tool, arguments_rule, without

_ANYTHING = "/(?s:.*)/"
log = logging.getLogger(__name__)

_GAP = r"gap: /\s{0,4}/"  # between reasoning and what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Constraints on an answer."""

    tools: tuple[Tool, ...] = ()  # functions that it may call
    first_tool: int = 0  # index of the first one among the functions of the request
    must_call: bool = False  # it consists of calls only
    several: bool = True  # it may have several calls
    content: Guided | None = None  # the structure of its content, unless it is a call
    starts_in_reasoning: bool = False  # its text begins with reasoning
    thinking_budget: int | None = None  # maximum number of reasoning tokens; None: no limit

    @property
    def has_structure(self) -> bool:
        """Whether the text is constrained; otherwise the schemas of tools are not used."""
        return self.must_call or self.content is not None or any(tool.strict for tool in self.tools)

    @property
    def parts(self) -> Iterator[tuple[int | None, Guided]]:
        """The caller's structures, to find an invalid one: the content (None), and those of the tools by index."""
        if self.content is not None:
            yield None, self.content
        yield from ((i, _arguments(tool)) for i, tool in enumerate(self.tools))

    def field_of(self, index: int | None) -> str:
        """Return the request's field with one of `parts`; "" for the content, which names its own."""
        return "" if index is None else f"messages.tools[{self.first_tool + index}].parameters"

    def relaxed(self, index: int, problem: str) -> Answer:
        """Return the same with any object as the arguments of one tool; `problem` is logged."""
        tools = list(self.tools)
        log.warning("the parameters of the non-strict tool %r are not enforced: %s", tools[index].name, problem)
        tools[index] = replace(tools[index], parameters=ANY_OBJECT)
        return replace(self, tools=tuple(tools))


def _arguments(tool: Tool) -> Guided:
    """Return the structure of a tool's arguments; if it is not strict, without unsupported keywords."""
    if not tool.strict:
        with suppress(ValueError, RecursionError):
            return Guided(grammar=f"start: {arguments_rule(tool)}")
    return Guided(json_schema=tool.parameters)


def structure_of(answer: Answer, chat_format: ChatFormat) -> Guided | None:
    """Return the structure of the whole text; None for any text. Raises ValueError if a part is invalid."""
    marks, thinking = chat_format.reasoning, None
    if answer.thinking_budget is not None and marks is not None:
        begin = None if answer.starts_in_reasoning else marks.begin
        thinking = ThinkingBudget(max_tokens=answer.thinking_budget, end=marks.end, begin=begin)
    if not answer.has_structure:
        return None if thinking is None else Guided(thinking=thinking)
    is_plain = marks is None and not chat_format.prefix(has_reasoned=False)
    if is_plain and answer.content is not None and not answer.tools:
        return answer.content  # unchanged, so that errors refer to the caller's text
    return Guided(grammar="\n".join([*_start(answer, chat_format), *_rules(answer, chat_format)]), thinking=thinking)


def _start(answer: Answer, chat_format: ChatFormat) -> Iterator[str]:
    """Yield the rule `start`: reasoning, if the model marks it, then the answer."""
    marks = chat_format.reasoning
    if marks is None:
        yield "start: plain"
        return
    end = chat_format.literal(marks.end)
    if answer.starts_in_reasoning:
        yield "start: inside gap reasoned"
    else:
        yield f"start: {chat_format.literal(marks.begin)} inside gap reasoned | plain"
    if marks.end in chat_format.special:
        yield f"inside: THOUGHT {end}"  # other tokens must not spell the end, because the parser would find it
        yield f"THOUGHT: {_ANYTHING}{without(marks.end)}"
    else:
        yield f"inside[suffix={end}]: {_ANYTHING}"
    yield _GAP


def _rules(answer: Answer, chat_format: ChatFormat) -> Iterator[str]:
    """Yield the rules `plain` and `reasoned`: answers without and after reasoning."""
    marks = chat_format.reasoning
    calls = bool(answer.tools) and (answer.must_call or answer.content is not None)
    for name, has_reasoned in (("plain", False), ("reasoned", True))[: 1 + (marks is not None)]:
        before = chat_format.prefix(has_reasoned=has_reasoned)
        if answer.must_call:
            yield f"{name}: calls"
        elif answer.content is not None:
            yield f"{name}: {before} content{' | calls' if calls else ''}"
        else:
            yield f"{name}: auto"
    if answer.content is not None and not answer.must_call:
        yield f"content: {rule_of(answer.content)}"
    if calls:
        yield chat_format.calls(answer.tools, several=answer.several)
    elif answer.content is None:
        unlike = None if marks is None or answer.starts_in_reasoning else marks.begin
        yield chat_format.auto(answer.tools, several=answer.several, unlike=unlike)
