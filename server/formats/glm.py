r"""Calls of GLM 4.5 and later: pairs of a key and a value.

`<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`, one after another. GLM 4.7 writes no line
breaks.
"""

from __future__ import annotations

from server.formats.tagged import TaggedFormat, Tags


class GlmFormat(TaggedFormat):
    """The name of the function, and `<arg_key>` and `<arg_value>` for each argument."""

    name = "glm"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    trigger = "<tool_call>"
    turns = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>")
    tags = Tags(
        begin="<tool_call>",
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        end=("", "</tool_call>"),
        is_indented=False,
        line=r'"\n"?',
    )
