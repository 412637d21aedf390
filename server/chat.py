"""Renders conversations to text with the checkpoint's own chat template. Contains no token or tensor code.

A template is a program. It runs in jinja's sandbox, with limits on loop iterations and on the length of the text, so
that no conversation can make it run forever. Its memory use has no other limit: templates, like weights, must come from
a trusted source.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.engine.errors import InvalidRequest, ModelError, shown
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.gguf.container import open_gguf
from pilotfish.engine.model.gguf.tokenizer import chat_template_in, special_tokens_in
from pilotfish.server.formats.base import Tool

MAX_TURNS = 200_000  # iterations of all loops plus calls of all macros
MAX_TEXT = 4 << 20  # characters of a rendered conversation; also items of the result of one `*`
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_SOURCE = 1 << 17  # characters of a template; published ones have at most a third of it
_CUT = "\ue000\ue001"  # marks the end of a last message that is to be continued; the text after it is dropped


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in a turn of the assistant; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation. `tool_call_id`: of a turn of role "tool", the call whose result this is."""

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation, and what the chat template and the structure of the answer depend on.

    Args:
        messages: oldest first.
        tools: functions that the model may call.
        tool_choice: whether it has to call one.
        tool_name: the function that it has to call; None: `tool_choice` decides.
        parallel_tool_calls: whether one turn may have several calls.
        template_arguments: more variables of the template, as the text of a JSON object.
        add_generation_prompt: open the assistant's next turn; None: unless the last message is continued.
        continue_final_message: continue the last message instead of answering it.
        thinking_budget: maximum number of tokens of reasoning; None: no limit.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    template_arguments: str = "{}"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    thinking_budget: int | None = None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_name is not None or self.tool_choice == "required"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call: of a named one, that one only."""
        if self.tool_name is not None:
            return tuple(tool for tool in self.tools if tool.name == self.tool_name)
        return () if self.tool_choice == "none" else self.tools


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`, which can use `special_tokens` by name. Raises ModelError if it is invalid."""
        if len(source) > MAX_SOURCE:
            raise ModelError(f"the chat template has {len(source)} characters; expected at most {MAX_SOURCE}")
        self.source, self._special_tokens = source, dict(special_tokens)
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(self._environment.counted(source))
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is invalid: line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:  # of jinja's generated code
            raise ModelError(f"the chat template is nested too deeply: {error!r}") from error

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> ChatTemplate | None:
        """Load the template of a checkpoint; return None if it has none."""
        gguf = open_gguf(source, revision)
        if gguf is not None:
            template = chat_template_in(gguf)
            return None if template is None else cls(template, special_tokens_in(gguf))
        settings = _json(source, "special_tokens_map.json", revision)
        settings |= _json(source, "tokenizer_config.json", revision)
        file = find_file(source, "chat_template.jinja", revision)
        text = _chosen(settings.get("chat_template")) if file is None else file.read_text("utf-8")
        return None if text is None else cls(text, _special_tokens(settings))

    @property
    def functions(self) -> frozenset[str]:
        """Names of the template's functions; variables must not have these names."""
        return frozenset(self._environment.globals)

    def render(
        self, messages: Iterable[dict[str, Any]], tools: Iterable[Tool] = (),
        arguments: Mapping[str, Any] | None = None, *, opens_turn: bool = True, continues: bool = False,
    ) -> str:  # fmt: skip
        """Render the conversation; special tokens are written as text.

        Args:
            messages: the turns, as dicts with role and content at least.
            tools: functions that the model may call.
            arguments: further variables of the template.
            opens_turn: write the opening of the assistant's next turn.
            continues: leave the last message open, so that the model continues it.

        Raises:
            InvalidRequest: the template rejects the conversation, or cannot render it within the limits.
        """
        turns = list(messages)
        if not 1 <= len(turns) <= MAX_MESSAGES:
            raise InvalidRequest.of("messages", f"has {len(turns)} messages; expected 1 to {MAX_MESSAGES}")
        if continues:
            turns[-1] = turns[-1] | {"content": turns[-1]["content"] + _CUT}
        values = self._special_tokens | {"documents": None} | dict(arguments or {})
        values |= {
            "messages": turns,
            "tools": [{"type": "function", "function": _declared(tool)} for tool in tools] or None,
            "add_generation_prompt": opens_turn,
        }
        self._environment.start()
        try:
            text = _joined(self._template.generate(values))  # not as keywords, because `self` is one of generate's
        except TemplateError as error:
            raise InvalidRequest.of("messages", f"cannot be rendered by the chat template: {error.message}") from error
        except Exception as error:  # expressions of a template can raise any exception
            problem = f"cannot be rendered by the chat template: {type(error).__name__}: {error}"
            raise InvalidRequest.of("messages", problem) from error
        if not continues:
            return text
        if _CUT not in text:
            raise InvalidRequest.of("messages", "cannot be continued: the chat template omits the last message")
        return text[: text.rindex(_CUT)]


class _Environment(ImmutableSandboxedEnvironment):
    """jinja with the filters and globals that chat templates expect, and with a limit on loop iterations."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        # `optimized` or a constant `finalize` would make jinja compute constants of any size at compile time.
        extensions = [_Generation, loopcontrols]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_finalized
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda pattern: datetime.now().astimezone().strftime(str(pattern)),
        }
        self._turns = threading.local()

    def start(self) -> None:
        """Reset the iteration counter of this thread."""
        self._turns.left = MAX_TURNS

    def turn(self) -> None:
        """Count one iteration; called by the compiled template. Raises SecurityError after too many."""
        self._turns.left -= 1
        if self._turns.left < 0:
            raise SecurityError(f"its loops exceed {MAX_TURNS} iterations")

    def counted(self, source: str) -> nodes.Template:
        """Parse `source` and insert a call of `turn` into each loop and macro.

        The call is an attribute of the environment, not a name, so that the template cannot override it.
        """
        tree = self.parse(source)
        loops: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for node in loops:
            call = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno).set_environment(self))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Reject powers and repetitions that would use too much memory, before they are computed."""
        if operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and hasattr(other, "__len__") and one * len(other) > MAX_TEXT:
                    raise SecurityError(f"a repetition has more than {MAX_TEXT} items")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@pass_context
def _finalized(_context: Context, value: object) -> object:
    return value


def _declared(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}


def json_object(field_name: str, text: str) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidRequest for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(field_name, f"is {shown(text)}, which is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest.of(field_name, f"is {shown(text)}; expected a JSON object")
    return found


def _joined(pieces: Iterable[str]) -> str:
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MAX_TEXT:
            raise SecurityError(f"the text exceeds {MAX_TEXT} characters")
    return "".join(found)


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # templates pass these arguments by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes that jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _json(source: str, name: str, revision: str | None) -> dict[str, Any]:
    path = find_file(source, name, revision)
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return found if isinstance(found, dict) else {}


def _chosen(found: Any) -> str | None:
    """Return the only template, or the one named `default` from a list of named templates."""
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, dict))
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return None if found is None else str(found)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by name; each value is a text or a dict with the key `content`."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
