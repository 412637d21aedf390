"""Laws of structured output: whatever is sampled under the masks fits, whatever fits may be said, nothing runs away."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models

import pilotfish.engine.text.guided
import pilotfish.engine.text.matcher
from pilotfish.engine.errors import GrammarFault, InvalidRequest, ModelError, Unsupported
from pilotfish.engine.params import Guided, ThinkingBudget
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.text.guided import GrammarCompiler
from pilotfish.engine.text.matcher import MAX_LEXER_STATES
from pilotfish.engine.text.schemas.numbers import MAX_WHITESPACE
from tests.engine.text.test_spelling import CODECS
from tests.schemas import random_schema

TARGET = Path(__file__).resolve().parents[3] / "models" / "target"
CODEC = Codec.load(TARGET)
TOKENS = 2048
VOCAB = 2100  # as wide as logits that were padded
END, SECOND_END = 0, 2047
GENEROUS = 60.0  # seconds: no test of speed, only that there is an end
COMPILER = GrammarCompiler(CODEC, VOCAB, [END, SECOND_END], compile_seconds=GENEROUS)
BYTES = {text: i for i in range(1, TOKENS) if len(text := COMPILER._vocabulary.prepare().decode_bytes([i])) == 1}


def fill(state) -> list[int]:
    mask = torch.ones(VOCAB, dtype=torch.bool)
    state.fill(mask)
    return mask.nonzero().flatten().tolist()


def walk(state, rng: random.Random, most: int = 4000) -> list[int]:
    """Random allowed tokens up to an end token, which is not among them; ends early as often as not."""
    tokens = []
    for _ in range(most):
        allowed = fill(state)
        ends = [token for token in allowed if token in (END, SECOND_END)]
        token = rng.choice(ends) if ends and (len(ends) == len(allowed) or rng.random() < 0.3) else rng.choice(allowed)
        assert state.advance([token]) == 1
        if token in (END, SECOND_END):
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens: {CODEC.decode(tokens)!r}")


def bytewise(text: str) -> list[int]:
    return [BYTES[bytes([byte])] for byte in text.encode()]


def start(guided: Guided):
    return COMPILER.compile(guided).start()


def schema(value: object) -> Guided:
    return Guided(json_schema=json.dumps(value))


def fits(guided: Guided, tokens: list[int]) -> bool:
    """Whether all of these tokens and then an end token are taken."""
    return start(guided).advance([*tokens, END]) == len(tokens) + 1


def refusal(guided: Guided, compiler: GrammarCompiler = COMPILER) -> str:
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as info:
        compiler.compile(guided)
    assert time.monotonic() - started < GENEROUS
    text = str(info.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


# What is sampled fits


@pytest.mark.parametrize("seed", range(25))
def test_a_random_walk_ends_in_a_document_of_its_schema(seed):
    wanted = random_schema(seed)
    text = CODEC.decode(walk(start(schema(wanted)), random.Random(seed)))
    jsonschema.validate(json.loads(text), wanted)


@pytest.mark.parametrize(
    ("guided", "regex"),
    [
        *((Guided(regex=regex), regex) for regex in (
            r"[a-z]{1,3}@[a-z]{1,5}\.(com|org)", r"(a|ab)(c|bcd)(d*){0,2}", r"[^a]{2,4}", "a/b|/|é€", r"\d{3}-\d{4}",
            "a{0,5}",
        )),
        (
            Guided(grammar='start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'),
            r"[1-9]\d{0,2}(\+[1-9]\d{0,2})*",
        ),
    ],
)  # fmt: skip
def test_a_regex_and_a_grammar_are_matched_as_a_whole(guided, regex):
    for seed in range(20):
        text = CODEC.decode(walk(start(guided), random.Random(seed)))
        assert re.fullmatch(regex, text), text


OBJECT, SPACES = Guided(json_schema='{"type": "object"}'), MAX_WHITESPACE
# With `\u` escapes the name `\u0061` would be another property to the masks, and `a` to the reader.
DECLARED = schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("guided", "text", "other"),
    [
        *((Guided(regex=regex), "aaa", "aab") for regex in ("a+?", "^a+$", r"(?:a)(?P<more>a*)")),
        (DECLARED, '{"a":1,"b":"x"}', '{"\\u0061":"x"}'),
        (OBJECT, '{"a": [1, -2.5e3, null, true, {"ü": "é\\n"}]}', "[1]"),
        (OBJECT, "{" + " " * SPACES + "}", "{" + " " * (SPACES + 1) + "}"),
        (Guided(json_schema="true"), "[1, 2]", "[1, 2"),
        (Guided(json_schema='{"const": "\\\\u0007\\n"}'), '"\\\\u0007\\n"', '"\\u0007\\n"'),  # no control character
    ],
)
def test_one_text_fits_and_one_does_not(guided, text, other):
    assert fits(guided, bytewise(text))
    assert not fits(guided, bytewise(other))


@given(st.lists(st.text(max_size=12), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_a_choice_is_one_of_its_texts_whatever_they_hold(texts, rng):
    guided = Guided(choice=(*texts, "fallback"))
    assert CODEC.decode(walk(start(guided), rng)) in guided.choice
    for text in guided.choice:
        assert fits(guided, bytewise(text)), repr(text)


# What fits may be said


@given(st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_any_tokenization_is_allowed(rng):
    text = '{"name": "größer than €", "n": [12345, -1.5e10], "self": null}'
    pieces, data = [], text.encode()
    while data:
        size = rng.randint(1, 12)
        token = next(i for n in range(size, 0, -1) if (i := TOKEN_OF.get(data[:n])) is not None)
        pieces.append(token)
        data = data.removeprefix(COMPILER._vocabulary.prepare().decode_bytes([token]))
    state = start(OBJECT)
    for token in pieces:
        assert token in fill(state)
        assert state.advance([token]) == 1
    assert fill(state) == [END, SECOND_END]


TOKEN_OF = {COMPILER._vocabulary.prepare().decode_bytes([i]): i for i in range(TOKENS) if i not in (END, SECOND_END)}


# End tokens


def test_end_tokens_only_where_it_may_end_and_only_one():
    state = start(Guided(regex="ab?"))
    assert END not in fill(state)
    assert state.advance([END]) == 0
    assert state.advance(bytewise("a")) == 1
    assert set(fill(state)) >= {END, SECOND_END, *bytewise("b")}
    assert state.advance([SECOND_END, END]) == 1
    assert fill(state) == [END, SECOND_END]
    assert state.advance([END]) == state.advance(bytewise("b")) == 0


def test_rollback_through_an_end_token():
    state = start(Guided(regex="ab?"))
    first = fill(state)
    a, b = bytewise("ab")
    assert state.advance([a, b, END, b]) == 3
    state.rollback(1)
    assert fill(state) == [END, SECOND_END]
    state.rollback(1)
    assert b in fill(state)
    assert state.advance([SECOND_END]) == 1
    state.rollback(0)
    assert state.advance([b]) == 0
    state.rollback(2)
    assert fill(state) == first


def test_an_end_token_is_never_text():
    """Token 2047 is text to the tokenizer; since it ends outputs, the masks show it only where one may end."""
    assert CODEC.decode([SECOND_END]).isalpha()
    state = start(Guided(regex=".*!"))
    assert SECOND_END not in fill(state)
    assert state.advance([SECOND_END]) == 0


def test_ids_beyond_the_tokenizer_are_never_allowed():
    state = start(Guided(regex="(?s:.)*"))
    assert max(fill(state)) < TOKENS
    assert state.advance([TOKENS + 1]) == 0
    assert state.advance(bytewise("a")) == 1


@pytest.mark.parametrize(
    ("vocab_size", "eos", "problem"),
    [
        (TOKENS, [], "is empty"),
        (TOKENS, [TOKENS], "has 2048; expected 0 to 2047"),
        (100, [0], "the tokenizer has 2048"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_at_load(vocab_size, eos, problem):
    with pytest.raises(ModelError, match=problem):
        GrammarCompiler(CODEC, vocab_size, eos)


def test_a_decoder_without_bytes_is_refused_at_load():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ModelError, match="decoder is not of bytes"):
        GrammarCompiler(Codec(tokenizer), 2, [0])


@pytest.mark.parametrize("name", CODECS)
def test_the_library_has_the_tokens_that_it_reads_in_the_file(name):
    codec = CODECS[name]
    if not codec.spelling.has_bytes:
        return
    size = codec.tokenizer.get_vocab_size() + 3
    expected = LLTokenizer(codec.tokenizer.to_str(), n_vocab=size, eos_token=[0, 1])
    made = GrammarCompiler(codec, size, [0, 1])._vocabulary.prepare()
    for token in range(size):
        assert made.decode_bytes([token]) == expected.decode_bytes([token])
        assert made.dbg_tokens([token]) == expected.dbg_tokens([token])
        assert made.is_special_token(token) == expected.is_special_token(token)
    assert (made.vocab_size, made.eos_tokens) == (expected.vocab_size, expected.eos_tokens)


def test_tokens_are_prepared_once_and_not_before_a_structure_needs_them(monkeypatch):
    made = []

    def make(*args, **options):
        made.append(args)
        if len(made) == 1:
            raise ValueError("no room")
        return LLTokenizer(*args, **options)

    monkeypatch.setattr(pilotfish.engine.text.matcher, "LLTokenizer", make)
    failing, sound = (GrammarCompiler(CODEC, VOCAB, [END]) for _ in range(2))
    sound.compile(Guided(thinking=ThinkingBudget(max_tokens=2, end="</think>")))
    assert made == []
    for _ in range(2):
        with pytest.raises(Unsupported, match="guided decoding does not support this tokenizer: no room"):
            failing.compile(Guided(regex="a"))
    for text in "ab":
        assert sound.compile(Guided(regex=text)).start().advance(bytewise(text)) == 1
    assert len(made) == 2


# Going forward and back is going there directly


@given(st.integers(0, 99), st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_any_way_to_a_place_is_the_same_place(seed, rng):
    grammar = COMPILER.compile(schema(random_schema(seed)))
    state, taken = grammar.start(), []
    for _ in range(40):
        if rng.random() < 0.35:
            back = rng.randint(0, len(taken))
            state.rollback(back)
            taken = taken[: len(taken) - back]
        else:
            drafts = [rng.choice(fill(state)), *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 2)))]
            count = state.advance(drafts)
            assert (count > 0) == (not taken or taken[-1] not in (END, SECOND_END))
            taken += drafts[:count]
        fresh = grammar.start()
        assert fresh.advance(taken) == len(taken)
        assert fill(fresh) == fill(state)


@given(st.integers(0, 99), st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_a_token_is_taken_if_and_only_if_the_mask_has_it(seed, rng):
    state = start(schema(random_schema(seed)))
    for _ in range(8):
        allowed = fill(state)
        for token in rng.sample(range(VOCAB), 60):
            assert state.advance([token]) == (token in allowed)
            state.rollback(int(token in allowed))
        if state.advance([token := rng.choice(allowed)]) and token in (END, SECOND_END):
            return


# Limits


HOSTILE = {
    "nested brackets": (Guided(regex="(" * 30000 + "a" + ")" * 30000), "maximum number of nested"),
    "back-reference": (Guided(regex=r"(a)\1"), "backreferences are not supported"),
    "intersection": (Guided(grammar="start: R\nR: /(.*a.{12})/ & /(.*b.{13})/ & /(.*c.{14})/"), "too many expressions"),
    "coprime periods": (
        Guided(grammar="start: R\nR: " + " & ".join(f"/(a{{{p}}})+/" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))),
        "fuel exhausted",
    ),
    "many nullables": (Guided(grammar="start: " + "[A] " * 3000 + "\nA: /a+/"), "Too many items"),
    "deep grammar": (Guided(grammar="start: " + "(" * 20000 + '"a"' + ")" * 20000), "too deeply nested"),
    "endless": (Guided(grammar="start: start"), "the grammar failed"),
    "a special token in the midst": (Guided(grammar='start: <|endoftext|> "a"'), "no token is allowed"),
    "broken schema": (Guided(json_schema="{"), "Expecting property name"),
    "deep schema": (Guided(json_schema='{"items":' * 6000 + "true" + "}" * 6000), "recursion"),
    "remote reference": (
        Guided(json_schema='{"$ref": "http://example.com/x"}'),
        "does not refer to a part of the schema",
    ),
    "unknown keyword": (Guided(json_schema='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "no document": (
        Guided(json_schema='{"type": "integer", "minimum": 5, "maximum": 3}'),
        "the schema is unsatisfiable",
    ),
    "combinations": (
        schema({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(3)]} for i in range(12)]}),
        "schema too large",
    ),
    "control character": (Guided(json_schema='{"enum": ["a\\u0007"]}'), "the control character \\u0007"),
    "decimal multiple": (Guided(json_schema='{"type": "number", "multipleOf": 0.3}'), "multipleOf 0.3"),
    "library's options": (Guided(grammar='start: %json {"x-guidance": {}}'), "x-guidance"),
    "multiples": (schema({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 9973}]}), "multipleOf"),
    "multiple in a grammar": (Guided(grammar='start: %json {"type": "integer", "multipleOf": 999983}'), "multipleOf"),
    "multiples at many places": (
        schema({"prefixItems": [{"type": "integer", "multipleOf": 19_000 + i} for i in range(9)]}),
        "the sum of all large multipleOf exceeds the limit",
    ),
    "least common multiple": (
        schema({"allOf": [{"multipleOf": 10**90 + i} for i in range(5)]}),
        "whose least common multiple is above 1e400",
    ),
    "names that many patterns match": (
        schema({"patternProperties": {f"^x{i}_": True for i in range(60)}}),
        "schema too large",
    ),
    "strings to compare": (
        schema({"oneOf": [{"pattern": f"^a{i}_"} for i in range(60)], "type": "string"}),
        "too large",
    ),
    "optional anchors": (schema({"pattern": "(^|a?)($|b?)" * 40}), "is too large"),
    "many items": (schema({"prefixItems": [True] * 9000}), "grammar size"),
    "many objects": (schema({"enum": [{"a": i, "b": [i]} for i in range(2500)]}), "too large"),
    "many optional properties": (
        schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}),
        "Current row has",
    ),
    "surrogate": (Guided(choice=("a", "b\ud800")), "guided.choice[1] has '\\ud800' at 1"),
    "nothing": (Guided(), "guided has none"),
    "two": (Guided(regex="a", choice=("a",)), "guided has regex and choice"),
    "no texts": (Guided(choice=()), "guided.choice has 0 texts"),
    "long choice": (Guided(choice=("a" * 40000, "b" * 40000)), "guided.choice has 80000 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_served_is_refused_with_its_reason(name):
    guided, reason = HOSTILE[name]
    assert reason in refusal(guided)


LARGE = {
    "rules": Guided(grammar="start: a0\n" + "".join(f'a{i}: "x" a{i + 1}?\n' for i in range(3500)) + 'a3500: "x"'),
    "terminals": Guided(grammar="start: T0\n" + "".join(f'T{i}: "x" T{i + 1}\n' for i in range(3500)) + 'T3500: "x"'),
    "doubled": schema({
        "$defs": {"d0": {"type": "string"}} | {
            f"d{i + 1}": {"allOf": [{"$ref": f"#/$defs/d{i}"}] * 2} for i in range(40)
        },
        "$ref": "#/$defs/d40",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_leads_far_from_rule_to_rule_compiles(name):
    state = COMPILER.compile(LARGE[name]).start()
    assert fill(state)


COSTLY_LATER = {
    "nested repeats": Guided(regex="((a{1,1000}){1,1000}){1,1000}"),
    "long alternatives": Guided(regex="(" + "|".join(f".{{{i}}}x" for i in range(1, 300)) + ")+"),
    "many-branched": Guided(
        grammar="start: s\ns: " + " | ".join(" ".join("s" * k) for k in range(2, 40)) + ' | "a" | "b" | "ab"'
    ),
}


@pytest.mark.parametrize("name", COSTLY_LATER)
def test_what_costs_too_much_later_ends_its_own_request(name):
    """Either it goes on for as long as we look, or GrammarFault ends it: nothing hangs, nothing else is raised."""
    state, rng, started = start(COSTLY_LATER[name]), random.Random(0), time.monotonic()
    try:
        for _ in range(300):
            allowed = [token for token in fill(state) if token not in (END, SECOND_END)]
            if not allowed or not state.advance([rng.choice(allowed)]):
                break
    except GrammarFault:
        with pytest.raises(GrammarFault, match="the grammar failed"):  # it does not recover in silence
            fill(state)
    assert time.monotonic() - started < GENEROUS


# Each state fails alone


def test_a_lexer_at_its_limit_is_no_fault_of_the_others(monkeypatch):
    monkeypatch.setattr("pilotfish.engine.text.matcher.MAX_LEXER_STATES", 300)
    compiler = GrammarCompiler(CODEC, VOCAB, [END])
    guided = Guided(regex="([a-c][d-f]){1,400}")
    bystander = compiler.compile(guided).start()
    text = bytewise("adbecf" * 20)
    assert bystander.advance(text) == len(text)
    grammar = compiler.compile(guided)
    expected = fill(grammar.start()), fill(bystander)
    monkeypatch.setattr("pilotfish.engine.text.matcher.MAX_LEXER_STATES", MAX_LEXER_STATES)  # alone it has room
    for seed in range(40):  # random walks until the lexer that all states share has met its limit
        state, rng = grammar.start(), random.Random(seed)
        while not grammar.worn and (allowed := [t for t in fill(state) if t not in (END, SECOND_END)]):
            state.advance([rng.choice(allowed)])
    assert grammar.worn
    assert fill(bystander) == expected[1]
    assert fill(grammar.start()) == expected[0]
    bystander.rollback(len(text))
    assert fill(bystander) == expected[0]
    assert compiler.compile(guided) is not grammar


# The cache, and callers that wait


@pytest.fixture
def counted(monkeypatch):
    """What was compiled, in order; `gate` holds the compiling of regexes that contain `wait`."""
    compiled, real = [], pilotfish.engine.text.guided._compile
    gate = threading.Event()

    def compile_and_count(vocabulary, guided):
        compiled.append(guided)
        if "wait" in (guided.regex or ""):
            assert gate.wait(GENEROUS)
        return real(vocabulary, guided)

    monkeypatch.setattr(pilotfish.engine.text.guided, "_compile", compile_and_count)
    yield compiled, gate
    gate.set()


def limited(**limits) -> GrammarCompiler:
    return GrammarCompiler(CODEC, VOCAB, [END], **limits)


def test_one_source_compiles_once_failures_too(counted):
    compiled, _ = counted
    compiler = limited()
    grammar = compiler.compile(Guided(regex="a"))
    assert compiler.compile(Guided(regex="a")) is grammar
    assert refusal(Guided(regex="("), compiler) == refusal(Guided(regex="("), compiler)
    compiler.compile(Guided(choice=("a",)))
    assert compiled == [Guided(regex="a"), Guided(regex="("), Guided(choice=("a",))]


def test_callers_at_once_share_one_compilation(counted):
    compiled, gate = counted
    compiler = limited()
    with ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(compiler.compile, Guided(regex="wait")) for _ in range(4)]
        other = threads.submit(limited().compile, Guided(regex="b"))
        other.result(GENEROUS)
        gate.set()
        assert len({id(future.result(GENEROUS)) for future in waiting}) == 1
    assert compiled.count(Guided(regex="wait")) == 1


def test_the_least_recently_used_goes(counted):
    compiled, _ = counted
    compiler = limited(cache_entries=2)
    for letter in "abacab":
        compiler.compile(Guided(regex=letter))
    assert [guided.regex for guided in compiled] == ["a", "b", "c", "b"]


def test_who_waits_too_long_is_told_and_holds_up_nobody(counted):
    compiled, gate = counted
    compiler = limited(compile_seconds=1.0)
    assert "guided.regex is 'wait': compilation took more than 1 s" in refusal(Guided(regex="wait"), compiler)
    compiler.compile(Guided(regex="a"))  # another thread is free
    started = time.monotonic()
    refusal(Guided(regex="wait"), compiler)  # told at once: its time is over
    assert time.monotonic() - started < 0.9
    gate.set()
    deadline = time.monotonic() + GENEROUS
    while not compiler._entries[Guided(regex="wait")].result.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    compiler.compile(Guided(regex="wait"))
    assert compiled.count(Guided(regex="wait")) == 1


def test_a_caller_may_wait_longer_for_the_same(counted):
    """What is compiled again, beside the prompts of all interrupted streams, must not end its request."""
    compiled, gate = counted
    compiler = limited(compile_seconds=0.1)
    refusal(Guided(regex="wait"), compiler)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(compiler.compile, Guided(regex="wait"), GENEROUS)
        assert compiler.ready(Guided(regex="wait")) is None
        gate.set()
        grammar = waiting.result(GENEROUS)
    assert compiler.ready(Guided(regex="wait")) is grammar
    assert compiled == [Guided(regex="wait")]


def test_what_is_wrong_is_never_ready():
    compiler = limited()
    refusal(Guided(regex="("), compiler)
    assert compiler.ready(Guided(regex="(")) is None


def test_what_never_began_is_forgotten(counted):
    compiled, gate = counted
    compiler = limited(compile_seconds=0.2, compile_threads=1)
    refusal(Guided(regex="wait"), compiler)
    refusal(Guided(regex="a"), compiler)
    assert Guided(regex="a") not in compiler._entries
    gate.set()
    compiler._entries[Guided(regex="wait")].result.result(GENEROUS)
    compiler.compile(Guided(regex="a"))
    assert compiled == [Guided(regex="wait"), Guided(regex="a")]
