"""Conversations: inputs of the chat template and constraints on the answer. Independent of tokens and protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pilotfish.engine.config import Bounds
from pilotfish.engine.errors import InvalidRequest, Unsupported, Violation, shown
from pilotfish.engine.params import Guided
from pilotfish.engine.request.validation import structure_field, structure_texts, structure_violations
from pilotfish.engine.text.guided import rule_of
from pilotfish.server.chat import ChatMessage, ChatTemplate, Conversation, ToolCall, json_object
from pilotfish.server.formats.json_text import object_in, value_in
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.formats.structure import Answer
from pilotfish.server.model import ServedModel

_NO_JSON = "INVALID_JSON"  # key of arguments that are not a JSON object, as agents send them
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_NO_VARIABLES = ("chat_template", "tokenize")  # arguments of other renderers, without effect here


def text_of_conversation(asked: Conversation, model: ServedModel) -> str:
    """Return the conversation rendered by the chat template. Raises InvalidRequest if that is impossible."""
    assert model.chat is not None, "refused before this"
    found, arguments = list(_violations(asked)), dict[str, Any]()
    try:
        arguments = _template_arguments(asked, model.chat)
    except InvalidRequest as invalid:
        found += invalid.violations
    if found:
        raise InvalidRequest(found)
    offers = asked.tool_name is not None or asked.tool_choice != "none"
    continues, opens = asked.continue_final_message, asked.add_generation_prompt
    text = model.chat.render(
        map(record_of, asked.messages),
        asked.tools if offers else (),
        arguments,
        opens_turn=not continues if opens is None else opens,
        continues=continues,
    )
    if _SURROGATE.search(text):  # JSON can contain one as an escape
        raise InvalidRequest.of("messages", "contain an unpaired surrogate")
    return text


def starts_in_reasoning(asked: Conversation, text: str, model: ServedModel) -> bool:
    """Whether the rendered `text` ends within the model's reasoning."""
    marks = model.format.reasoning
    if marks is None:
        return False
    if asked.continue_final_message:
        text = asked.messages[-1].content
        return text.rfind(marks.begin) > text.rfind(marks.end)
    return text.rstrip().endswith(marks.begin)


def answer_of(asked: Conversation, guided: Guided | None, model: ServedModel, text: str | None) -> Answer:
    """Return the constraints on the answer; `text` is the rendered conversation, None if it could not be rendered.

    Raises InvalidRequest for an invalid schema or thinking budget, Unsupported if the format of calls is unknown.
    """
    answer = Answer(
        tools=asked.callable_tools,
        first_tool=next((i for i, tool in enumerate(asked.tools) if tool.name == asked.tool_name), 0),
        must_call=asked.must_call,
        several=asked.parallel_tool_calls,
        content=guided,
        starts_in_reasoning=text is not None and starts_in_reasoning(asked, text, model),
        thinking_budget=asked.thinking_budget,
    )
    if answer.tools and isinstance(model.format, PlainFormat):
        raise Unsupported(
            "messages.tools is set; the format of tool calls was not recognised in this model's chat template (option "
            "chat_format)"
        )
    return _sound(answer, model)


def _sound(answer: Answer, model: ServedModel) -> Answer:
    """Check the parts of the structure. A tool that is not strict accepts any object if its schema is invalid."""
    found, sound = list[Violation](), answer
    if answer.thinking_budget is not None and model.format.reasoning is None:
        problem = f"is {answer.thinking_budget}; this model has no reasoning markers"
        found.append(Violation("messages.thinking_budget", problem))
    for i, part in answer.parts if answer.has_structure else ():
        wrong = list(_part_violations(answer.field_of(i), part, model.engine.config))
        if wrong and i is not None and not answer.tools[i].strict:
            sound = sound.relaxed(i, wrong[0].problem)
        else:
            found += wrong
    if found:
        raise InvalidRequest(found)
    return sound


def _part_violations(field: str, part: Guided, bounds: Bounds) -> Iterator[Violation]:
    """Violations of a part of a structure; `field` is empty if the error names the field."""
    found = list(structure_violations(part, bounds.max_structure_bytes, bounds.max_choices))
    try:
        if not found:
            rule_of(part)
    except (ValueError, RecursionError) as error:
        text = " | ".join(text for _, text in structure_texts(part))
        found = [Violation(structure_field(part), f"is {shown(text)}: {error}")]
    return (replace(violation, field=field or violation.field) for violation in found)


def record_of(turn: ChatMessage) -> dict[str, Any]:
    """Convert a turn to the record that templates expect, without absent fields."""
    record: dict[str, Any] = {"role": turn.role, "content": turn.content}
    named = {"name": turn.name, "tool_call_id": turn.tool_call_id}
    record |= {name: value for name, value in named.items() if value is not None}
    if turn.tool_calls:
        record["tool_calls"] = [*map(_called, turn.tool_calls)]
    if turn.reasoning is not None:  # families use different names
        record |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), turn.reasoning)
    return record


def _called(call: ToolCall) -> dict[str, Any]:
    """Convert a call. Its arguments are repaired like a model's, and wrapped in an object if they still are none."""
    found = object_in(value_in(call.arguments.strip() or "{}") or "")
    arguments = {_NO_JSON: call.arguments} if found is None else found
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _template_arguments(asked: Conversation, template: ChatTemplate) -> dict[str, Any]:
    """Decode the variables of the template. Raises InvalidRequest for reserved names."""
    field = "messages.template_arguments"
    arguments = json_object(field, asked.template_arguments)
    whose = {
        "which is a field of the request": _OWN_FIELDS,
        "which is not a variable of a chat template": _NO_VARIABLES,
        "which is a function of chat templates": template.functions,
    }
    found = [(name, why) for why, names in whose.items() for name in sorted(arguments.keys() & set(names))]
    if found:
        raise InvalidRequest(Violation(field, f"has {name!r}, {why}") for name, why in found)
    return arguments


def _violations(asked: Conversation) -> Iterator[Violation]:
    if asked.continue_final_message and asked.add_generation_prompt:
        yield Violation("messages.add_generation_prompt", "is true; the last message is to be continued, not answered")
    names = set[str]()
    for i, tool in enumerate(asked.tools):
        if not _NAME.fullmatch(tool.name):
            yield Violation(
                f"messages.tools[{i}].name", f"is {shown(tool.name)}; expected 1 to 128 of A-Z a-z 0-9 . _ -"
            )
        if tool.name in names:
            yield Violation(f"messages.tools[{i}].name", f"is {shown(tool.name)}, which occurs twice")
        names.add(tool.name)
        field = f"messages.tools[{i}].parameters"
        try:
            kind = json_object(field, tool.parameters).get("type", "object")
        except InvalidRequest as invalid:
            yield from invalid.violations
        else:
            if kind != "object":
                yield Violation(field, f"has the type {shown(kind)}; expected object")
    if asked.tool_name is not None and asked.tool_name not in names:
        yield Violation("messages.tool_choice.name", f"is {shown(asked.tool_name)}, which is not in tools")
    elif asked.must_call and not names:
        yield Violation("messages.tool_choice.mode", "requires a call, but there are no tools")
