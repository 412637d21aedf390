"""Published tokenizers and chat templates: our tokens, texts and conversations are those of the libraries they are for.

`make test-published` runs it. The references are `tokenizers`, which reads a tokenizer.json as it is, and
`transformers`, which builds a tokenizer of the class that the settings name.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pilotfish.engine.text.codec import Codec, OutputText
from pilotfish.engine.text.matcher import GrammarVocabulary
from pilotfish.models import published
from pilotfish.server.admission.conversation import record_of
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import Tool
from pilotfish.v1 import generation_pb2 as pb

TEXTS = {
    "empty": "",
    "Latin": "Größe, œuvre, São Paulo, İstanbul; don't, we'll, I'VE",
    "Cyrillic and Greek": "Привет, как дела? Ёж и ёлка; Καλημέρα κόσμε",
    "East Asian": "你好,世界!今天天气很好。こんにちは、世界。カタカナ 안녕하세요 세계",
    "right to left": "مرحبا بالعالم ١٢٣; שלום עולם",
    "Indic and Thai": "नमस्ते दुनिया สวัสดีชาวโลก",
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 and 🤷🏽",
    "marks": "e\u0301 \u00e9 \ufb01 \u2460 z\u0338",
    "code": "def f(x):\n    return x ** 2  # naïve\n\n\nclass A:\n\tpass\n\nx = {'a': [1, 2]}; print(x['a'][-1])\n",
    "digits": "1234567890 3.14159 1,000,000 0x1F -7 1e-5",
    "spaces": "  two before, one after \n   \n\t\ttabs\r\nends   ",
    "odd spaces": "\u3000x\u00a0y\u200bz\ufeff\u2028\u0085w",
    "many spaces": "a" + " " * 100 + "b" + "\n" * 50,
    "controls": "\x00\x01\x7f",
    "one letter": "a" * 300,
    "names of special tokens": "<s> </s> <|im_start|>user<|im_end|> <bos><start_of_turn> <|eot_id|> <think> <|end|>",
    "long": "The quick brown fox jumps over the lazy dog, 12 times. Ja, das stimmt: größer! 你好\n" * 60,
}
# transformers builds Llama's anew, and cuts runs of spaces in another way than the file says.
REBUILT = ("llama2",)
WEATHER = (
    '{"type": "object", "properties": {"city": {"type": "string", "description": "a <town>"}}, "required": ["city"]}'
)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one question": [turn("user", "hi")],
    "system": [turn("system", " be brief \n"), turn("user", "a <b> é 你好")],
    "turns": [turn("user", "one"), turn("assistant", "two"), turn("user", "three\n")],
    "ends with an answer": [turn("user", "one"), turn("assistant", "two")],
}
TEMPLATES = ("qwen3", "gemma3", "deepseek_v3", "llama3_1")


@cache
def ours(name: str) -> Codec:
    codec = Codec.load(published.tokenizer(name))
    assert codec is not None
    return codec


@cache
def file_of(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(published.tokenizer(name) / "tokenizer.json"))


@cache
def built(name: str) -> Any:
    return AutoTokenizer.from_pretrained(published.tokenizer(name))


@cache
def template(name: str) -> ChatTemplate:
    found = ChatTemplate.load(str(published.tokenizer(name)))
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", published.TOKENIZERS)
def test_tokens_are_those_of_the_libraries(name: str, text: str) -> None:
    for bare in (False, True):
        ids = list(ours(name).encode(text, bare=bare))
        assert ids == file_of(name).encode(text, add_special_tokens=not bare).ids
        assert name in REBUILT or ids == built(name).encode(text, add_special_tokens=not bare)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", published.TOKENIZERS)
def test_text_is_that_of_the_libraries_token_by_token_too(name: str, text: str) -> None:
    ids = ours(name).encode(text, bare=True)
    whole = ours(name).decode(ids)
    assert whole == file_of(name).decode(list(ids))
    assert name in REBUILT or whole == built(name).decode(ids, skip_special_tokens=True)
    output = OutputText(ours(name))
    assert "".join("".join(output.push([token])) for token in ids) + output.flush() == whole
    told = [token for token in ids if token not in ours(name).special_tokens]
    spelt = [ours(name).spelling.bytes_of(token, leads=i == 0) for i, token in enumerate(told)]
    assert b"".join(data or b"" for data in spelt).decode() == whole


@pytest.mark.parametrize("name", published.TOKENIZERS)
def test_no_text_that_fits_is_refused_for_its_length(name: str) -> None:
    for text in TEXTS.values():
        assert ours(name).excess(text, max(1, len(ours(name).encode(text)))) is None


@pytest.mark.parametrize("name", published.TOKENIZERS)
def test_structures_have_the_tokens_that_their_library_reads_in_the_file(name: str) -> None:
    size = ours(name).tokenizer.get_vocab_size() + 2
    expected = LLTokenizer(file_of(name).to_str(), n_vocab=size, eos_token=[1])
    made = GrammarVocabulary(ours(name), size, (1,)).prepare()
    assert [made.dbg_tokens([i]) for i in range(size)] == [expected.dbg_tokens([i]) for i in range(size)]
    assert [made.decode_bytes([i]) for i in range(size)] == [expected.decode_bytes([i]) for i in range(size)]


@pytest.mark.parametrize("opens_turn", [True, False])
@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_written_as_by_transformers(name: str, turns: list[dict[str, str]], opens_turn: bool) -> None:
    text = template(name).render(turns, opens_turn=opens_turn)
    assert text == built(name).apply_chat_template(turns, tokenize=False, add_generation_prompt=opens_turn)
    ids = built(name).apply_chat_template(turns, add_generation_prompt=opens_turn, return_dict=False)
    assert list(ours(name).encode(text, bare=True)) == ids


@pytest.mark.parametrize("thinks", [True, False])
def test_tools_and_reasoning_are_written_as_by_transformers(thinks: bool) -> None:
    """Of these families only Qwen 3 declares tools, and writes calls and reasoning that are earlier turns."""
    calls = [
        pb.ToolCall(id="1", name="weather", arguments='{"city": "Köln"}'),
        pb.ToolCall(id="2", name="time", arguments="{}"),
    ]
    turns = [
        pb.ChatMessage(role="system", content="be brief"),
        pb.ChatMessage(role="user", content="How is it in Köln?"),
        pb.ChatMessage(role="assistant", tool_calls=calls, reasoning="Ask."),
        pb.ChatMessage(role="tool", content="rain <heavy>", tool_call_id="1"),
        pb.ChatMessage(role="tool", content="12:00", tool_call_id="2"),
    ]
    tools = Tool("weather", "the weather", WEATHER), Tool("time", "the time")
    records: list[dict[str, Any]] = [{"role": turn.role, "content": turn.content} for turn in turns]
    records[2]["reasoning_content"] = "Ask."
    records[2]["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls
    ]
    declared = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": json.loads(t.parameters)},
        }
        for t in tools
    ]
    text = template("qwen3").render(map(record_of, turns), tools, {"enable_thinking": thinks})
    assert text == built("qwen3").apply_chat_template(
        records, tools=declared, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
    )


def test_the_tokenizer_of_a_gguf_file_is_the_published_one() -> None:
    """Gemma 3's is published both ways: as pieces with scores in the GGUF file, and as a tokenizer.json with merges."""
    of_gguf, pieces = gemma_of_gguf(), random.Random(0)
    parts = ["a", "the ", "  ", " ", "\n", "\n\n", "\t", "1", "234", ".", "<h1>", "</td>", "é", "你", "😀", "▁",
             "<unused5>", "<start_of_turn>", "don't"]  # fmt: skip
    drawn = ["".join(pieces.choices(parts, k=pieces.randint(1, 12))) for _ in range(1000)]
    for text in [*drawn, *(text for name, text in TEXTS.items() if name != "many spaces")]:
        assert of_gguf.encode(text) == ours("gemma3").encode(text), repr(text)


@pytest.mark.xfail(reason="a GGUF file's tokens of 2 to 31 spaces are merged from halves, not cut off as the longest")
def test_a_run_of_spaces_is_cut_as_in_the_published_tokenizer() -> None:
    text = "a" + " " * 40 + "b"
    assert gemma_of_gguf().encode(text) == ours("gemma3").encode(text)


@cache
def gemma_of_gguf() -> Codec:
    codec = Codec.load(published.model("gemma-3"))
    assert codec is not None
    return codec
