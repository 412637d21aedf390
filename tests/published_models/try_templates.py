"""Two tools in published chat templates: all of functions, calls and results is in the prompt.

`make test-published` runs it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pilotfish.engine.text.codec import Codec
from pilotfish.models import published
from pilotfish.server.admission.conversation import text_of_conversation
from pilotfish.server.chat import ChatMessage, ChatTemplate, Conversation, ToolCall
from pilotfish.server.formats.base import Tool
from pilotfish.server.formats.detect import detect

CITY = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
TOOLS = (Tool("get_weather", "The weather.", CITY), Tool("get_time", "The time."))
USER = ChatMessage(role="user", content="How is it in Köln?")
CALLS = (ToolCall("abcdefgh1", "get_weather", '{"city": "Köln"}'), ToolCall("abcdefgh2", "get_time", "{}"))
ANSWERED = (
    USER,
    ChatMessage(role="assistant", tool_calls=CALLS),
    ChatMessage(role="tool", content="rain <heavy>", tool_call_id="abcdefgh1"),
    ChatMessage(role="tool", content="noon", tool_call_id="abcdefgh2"),
)
# The format of each template; where it is the generic one, the variant: the turn with the functions.
FOUND = {
    "qwen3": ("hermes", ""),
    "gemma3": ("generic", "system"),
    "deepseek_v3": ("generic", "system"),
    "llama3_1": ("generic", "system"),
    "smollm2": ("generic", "system"),
}
WRITTEN = """<tool_call>
{"name": "get_weather", "arguments": {"city": "Köln"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call>"""
RESULTS = "<tool_response>\nrain <heavy>\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"


def text_of(name: str, *messages: ChatMessage, tools: tuple[Tool, ...] = TOOLS) -> str:
    source = str(published.model(name) if name in published.MODELS else published.tokenizer(name))
    template, codec = ChatTemplate.load(source), Codec.load(source)
    assert template is not None
    assert codec is not None
    model = SimpleNamespace(chat=template, format=detect(template, codec.added_tokens))
    assert (model.format.name, model.format._variant) == FOUND[name]
    return text_of_conversation(Conversation(messages=messages, tools=tools), model)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FOUND)
def test_functions_calls_and_results_are_in_the_prompt(name: str) -> None:
    for messages in ((USER,), (ChatMessage(role="system", content="Be brief."), USER)):
        text = text_of(name, *messages)
        assert all(tool.name in text for tool in TOOLS)
        assert '"properties": {"city": {"type": "string"}}' in text
        assert USER.content in text
        assert len(messages) == 1 or text.index("Be brief.") < text.index("get_weather") < text.index(USER.content)
    text = text_of(name, *ANSWERED)
    assert text.index("get_weather") < text.index(USER.content) < text.index(WRITTEN) < text.index(RESULTS)
    again = text_of(name, *ANSWERED, USER)
    assert again.index(RESULTS) < again.rindex(USER.content)
    untold = text_of(name, *ANSWERED, tools=())
    assert WRITTEN in untold
    assert RESULTS in untold
    assert "<tools>" not in untold
