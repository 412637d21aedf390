r"""Calls of Qwen3-Coder and Qwen 3.5: parameters as XML.

`<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>`, one after another.
"""

from __future__ import annotations

from server.formats.tagged import TaggedFormat, Tags


class QwenCoderFormat(TaggedFormat):
    """`<function=f>` with a `<parameter=x>` for each argument."""

    name = "qwen_coder"
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tags = Tags(
        begin="<tool_call>",
        name=("<function=", ">"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        end=("</function>", "</tool_call>"),
        is_indented=True,
        line=r'"\n"',
    )
