"""Mistral's models, in all variants of their tokenizers."""

from __future__ import annotations

from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.json_calls import MistralFormat
from tests.server.formats.laws import Calls, Family, Spelling, called, dumped, some_calls
from tests.server.formats.walks import Masks, markers_of, plain_masks

TOKENS = Masks(dict.fromkeys(markers_of(MistralFormat), True))
THINK = ReasoningMarks("[THINK]", "[/THINK]")
A = '{"a": 1}'


def write_v3(calls: Calls) -> str:
    objects = (f'{{"name": "{name}", "arguments": {dumped(given)}, "id": "aB3dEf6hI"}}' for name, given in calls)
    return f"[TOOL_CALLS][{', '.join(objects)}]"


def write_v13(calls: Calls, call_id: str = "") -> str:
    return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{dumped(given)}" for name, given in calls)


def write_v11(calls: Calls) -> str:
    return write_v13(calls, "[CALL_ID]aB3dEf6hI")


IN_TOKENS, IN_TEXT = some_calls("[/INST]", "]"), some_calls("[TOOL_CALLS]", "[ARGS]", '"}]')
MISTRAL = Family(
    name="mistral",
    spellings=[
        Spelling(f"mistral-{variant}{end}", MistralFormat(masks.ids, THINK, variant=variant), masks, write, calls)
        for end, masks, calls in (("", TOKENS, IN_TOKENS), ("-text", plain_masks(), IN_TEXT))
        for variant, write in (("v3", write_v3), ("v11", write_v11), ("v13", write_v13))
    ],
    readings={
        # A call that breaks off takes none with it that begins later.
        '[TOOL_CALLS]get[ARGS]{"a": "x[TOOL_CALLS]get[ARGS]{"a": 1}': called(
            A, content='[TOOL_CALLS]get[ARGS]{"a": "x'
        ),
        '[TOOL_CALLS][{"name": "get",[TOOL_CALLS] {}}, {"name": "get", "arguments": {"a": 1}}]': called(
            A, content='[TOOL_CALLS][{"name": "get",[TOOL_CALLS] {}}'
        ),
        '[TOOL_CALLS]get[ARGS]{"a": [[TOOL_CALLS]get[ARGS]{"a": 1}': called(A, content='[TOOL_CALLS]get[ARGS]{"a": ['),
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}], {"name": "get", "arguments": {"a": 1}}]': called(A, A),
        '[TOOL_CALLS][{"name": "get", "arguments": {}, "a": 1}}, {"name": "get", "arguments": {"a": 1}}]': called(
            A, content='[TOOL_CALLS][{"name": "get", "arguments": {}, "a": 1}}'
        ),
        '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]\n': called(A),
        '[TOOL_CALLS][{"id": "x", "name": "get", "arguments": {"a": 1}}': called(A),
        '[TOOL_CALLS]get[CALL_ID]x[ARGS] {"a": 1}': called(A),
        **dict.fromkeys(("[TOOL_CALLS]get[ARGS]", '[TOOL_CALLS]get[ARGS]""'), called("{}")),
        '[TOOL_CALLS]get[ARGS][TOOL_CALLS]get[ARGS]{"a": 1}}[TOOL_CALLS]get[ARGS]{"a": 1}} ': called("{}", A, A),
        '[TOOL_CALLS]get[ARGS]{"a": "x}[TOOL_CALLS]get[ARGS]{"a": 1}': called(
            A, content='[TOOL_CALLS]get[ARGS]{"a": "x}'
        ),
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}, {"name": "get", "arguments": {"a": 1}}}]': called(A, A),
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": }}, {"name": "get", "arguments": {"a": 1}}]': called(
            A, content='[TOOL_CALLS][{"name": "get", "arguments": {"a": }}'
        ),
    },
    cut={
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}, {"name": "ge': called(A),
        **dict.fromkeys(("[TOOL_CALLS]get[ARGS]", "[TOOL_CALLS]get[CALL_ID]x", "[TOOL_CALLS]get[ARGS]{"), called()),
    },
    contents=(
        *("[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]get_y[ARGS]{}", "[TOOL_CALLS]get{}", "[TOOL_CALLS]get[ARGS]3"),
        *('[TOOL_CALLS][{"name": "other", "arguments": {}}]', '[TOOL_CALLS]["get"]', "[TOOL_CALLS][]", "[ARGS]{}"),
        *(
            "[TOOL_CALLS]get[CALL_ID]a b[ARGS]{}",
            "[TOOL_CALLS]get[CALL_ID]x",
            "[TOOL_CALLS]",
            "[TOOL_CALLS]ge",
            '[TOOL_CALLS][{"name": "ge',
        ),
    ),
    broken=("[ARGS]", write_v13([("get", {})])),
    hostile=("[TOOL_CALLS]get[ARGS]",),
    repeated=(
        *("[", "[THINK]", "[TOOL_CALLS]get[CALL_ID]", "[TOOL_CALLS]get[CALL_ID]a ", '[TOOL_CALLS][{"id": "'),
        *("[TOOL_CALLS][", "[TOOL_CALLS] "),
    ),
)
