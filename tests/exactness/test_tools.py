"""Calls of functions and reasoning through the whole engine: every format, the same with drafts and without.

A random target says what its structure allows: reasoning up to its budget, then calls whose arguments have one of some
schemas, or content that has a structure. The tokenizer has the special tokens of all formats.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.llm import LLM
from pilotfish.engine.params import Guided, SamplingParams
from pilotfish.engine.text.codec import Codec, OutputText
from pilotfish.engine.types import FinishReason
from pilotfish.models import embedded_target
from pilotfish.server.formats.base import CallArguments, Reasoning, ReasoningMarks, Tool
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.detect import FORMATS
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat, MistralFormat
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.formats.structure import Answer, structure_of
from pilotfish.server.formats.tagged import GlmFormat, QwenCoderFormat
from tests import heads, zoo
from tests.covering import some
from tests.sameness import asking, assert_same, run
from tests.server.formats.laws import SCHEMAS
from tests.server.formats.walks import joined, markers_of

THINK = ReasoningMarks("<think>", "</think>")
BRACKETS = ReasoningMarks("[THINK]", "[/THINK]")
GEMMA = ReasoningMarks("<|channel>thought", "<channel|>")
# Formats as their checkpoints have them: the tokens that are special there, and the marks of reasoning.
MADE = {
    "hermes": lambda ids: HermesFormat({}, THINK),
    "qwen_coder": lambda ids: QwenCoderFormat({}, THINK),
    "glm": lambda ids: GlmFormat({}, THINK),
    "llama": lambda ids: LlamaFormat(ids),
    "mistral-v3": lambda ids: MistralFormat(ids, variant="v3"),
    "mistral-v11": lambda ids: MistralFormat(ids, BRACKETS, variant="v11"),
    "mistral-v13": lambda ids: MistralFormat(ids, BRACKETS, variant="v13"),
    "functiongemma": lambda ids: GemmaFormat(ids, variant="functiongemma"),
    "gemma4": lambda ids: GemmaFormat(ids, GEMMA, variant="gemma4"),
    "deepseek-v3": lambda ids: DeepSeekFormat(ids, THINK, variant="v3"),
    "deepseek-v3.1": lambda ids: DeepSeekFormat(ids, THINK, variant="v3.1"),
    "harmony": lambda ids: HarmonyFormat(ids),
}
OF_TOKENS = [name for name in MADE if name not in ("hermes", "qwen_coder", "glm")]
MARKS = ("[THINK]", "[/THINK]", "<|channel>", "<channel|>")
SPECIAL = tuple(dict.fromkeys([*MARKS, *(marker for name in OF_TOKENS for marker in markers_of(MADE[name]({})))]))
PROMPT = "import json\n\nprint(json.dumps(value)) # -> "
BUDGET, MOST = 6, 160
NUMBERS = range(12)  # of `SCHEMAS`: one for each format
OTHER = Tool("get_x", parameters='{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}')


@cache
def codec():
    tokenizer = Tokenizer.from_file(str(Path(embedded_target()) / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Codec(tokenizer)


@cache
def formats():
    ids = {text: codec().tokenizer.token_to_id(text) for text in SPECIAL}
    return {name: make(ids) for name, make in MADE.items()}


def test_every_format_is_here():
    assert {type(made) for made in formats().values()} | {PlainFormat} == set(FORMATS.values())


@cache
def models():
    torch.manual_seed(1)
    vocab = codec().tokenizer.get_vocab_size(with_added_tokens=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": vocab}
    others = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **others, max_position_embeddings=1024)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    folder = Path(tempfile.mkdtemp())
    drafts = heads.medusa(folder, vocab=vocab), heads.eagle(folder, vocab=vocab), "self:1"
    return zoo.as_served(zoo.ours(model)), zoo.as_served(zoo.near(model, 0.01)), drafts


@cache
def served(**options):
    target, draft, drafts = models()
    sizes = {"max_model_len": 512, "max_batch_size": 32, "max_batch_tokens": 256, "page_size": 16}
    config = EngineConfig(target="target", draft=drafts, **sizes | {"num_draft_tokens": 8} | options)
    return LLM.of(heads.assembled(config, target, draft), codec())


def tool_of(number):
    return Tool("get", parameters=json.dumps(SCHEMAS[number]), strict=True)


def cases():
    """Each schema with one format after the other; half of the answers reason first, half of them greedily."""
    names = [*MADE]
    for number in NUMBERS:
        name = names[number % len(names)]
        yield (
            name,
            number,
            Answer(
                tools=(tool_of(number), OTHER),
                must_call=True,
                several=number % 3 == 0,
                starts_in_reasoning=number % 2 == 0 and formats()[name].reasoning is not None and name != "harmony",
                thinking_budget=BUDGET if formats()[name].reasoning is not None else None,
            ),
        )


def requests():
    for name, number, answer in cases():
        guided = structure_of(answer, formats()[name])
        temperature = number // 2 % 2
        yield SamplingParams(
            guided=guided, temperature=temperature, seed=number, max_tokens=MOST, logprobs=0, logit_bias=closing()
        )


@cache
def closing():
    """What ends strings, objects, calls and outputs is likelier, so that most come to their end."""
    ends = ('"', "}", "]", ">", "<", "</", "<escape>", '<|"|>')
    return {0: 9.0} | {ids[0]: 6.0 for text in ends if len(ids := codec().encode(text, bare=True)) == 1}


def prompts():
    return [PROMPT[number % 20 :] for number in NUMBERS]


def generate(llm, proposer, num_draft):
    """All requests in one batch, each with a K of its own."""
    pairs = zip(prompts(), requests(), num_draft, strict=True)
    asked = [llm._request(prompt, sampling, asking(proposer, k), None) for prompt, sampling, k in pairs]
    return [done for (done,) in run(llm, asked)]


@cache
def plain():
    """One after the other, each alone."""
    llm = served(prefix_cache=False)
    pairs = zip(prompts(), requests(), strict=True)
    return [llm.generate(prompt, sampling, speculation=asking("none", 0))[0] for prompt, sampling in pairs]


def read(chat_format, tools, done, starts_in_reasoning, *, seed=None):
    """The pieces of an output that came in the rounds of some seed; None: token by token."""
    text = OutputText(codec(), skip_special_tokens=False)
    parser = chat_format.parser(tools, starts_in_reasoning=starts_in_reasoning)
    tokens = list(done.token_ids)
    if done.finish_reason is FinishReason.STOP:
        tokens.pop()  # the end token has no text
    rng, pieces = random.Random(seed), []
    while tokens:
        size = 1 if seed is None else rng.randint(1, 9)
        pieces += parser.push("".join(text.push(tokens[:size])))
        del tokens[:size]
    return [*pieces, *parser.push(text.flush()), *parser.finish()]


def test_calls_are_valid_and_streamed_pieces_join_to_them():
    finished = 0
    for (name, number, answer), done in zip(cases(), plain(), strict=True):
        assert done.error is None, (name, SCHEMAS[number])
        readings = [
            joined(read(formats()[name], answer.tools, done, answer.starts_in_reasoning, seed=seed))
            for seed in (None, 1, 2)
        ]
        assert readings[0] == readings[1] == readings[2], name
        if done.finish_reason is FinishReason.STOP:
            finished += 1
            assert readings[0].content == ""
            calls = readings[0].calls
            assert len(calls) == 1 or answer.several
            for call in calls:
                schema = {tool.name: json.loads(tool.parameters) for tool in answer.tools}[call.name]
                jsonschema.validate(json.loads(call.arguments), schema)
    assert finished >= len(NUMBERS) * 3 // 4


def test_reasoning_ends_with_its_budget():
    some = 0
    for (name, _, answer), done in zip(cases(), plain(), strict=True):
        marks = formats()[name].reasoning
        if marks is None:
            continue
        pieces = read(formats()[name], answer.tools, done, answer.starts_in_reasoning)
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        assert len(codec().encode(reasoning, bare=True)) <= 2 * BUDGET + 8
        some += bool(reasoning)
    assert some >= 3


@pytest.mark.parametrize("proposer", some(["auto", "suffix", "medusa"], ["auto"]))
def test_calls_are_the_same_with_drafts_in_ragged_batches(proposer):
    """In company, each request with another K from 0 to 8, and chunked: a step reads at most 48 tokens."""
    llm = served(max_batch_tokens=48, max_batch_size=12)
    got = generate(llm, proposer, [number % 9 for number in NUMBERS])
    for ours, theirs in zip(got, plain(), strict=True):
        assert_same(ours, theirs)
    llm.engine.check_invariants()
    assert sum(done.stats.drafted for done in got) > 0


def test_calls_are_the_same_when_they_were_predicted():
    """The reasoning ends, and calls begin and end, inside of one accepted run of up to 64 tokens."""
    llm, rounds = served(), []
    for prompt, sampling, theirs in zip(prompts(), requests(), plain(), strict=True):
        (ours,) = llm.generate(prompt, sampling, prediction=theirs.token_ids)
        assert_same(ours, theirs)
        rounds.append((ours.stats.rounds, len(ours.token_ids)))
    assert sum(count for count, _ in rounds) < sum(length for _, length in rounds) / 8


CONTENTS = {
    "schema": Guided(json_schema='{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
    "regex": Guided(regex="[a-c]{4,9}!"),
    "grammar": Guided(grammar='start: "yes" | "no" /[0-9]{1,3}/'),
    "choice": Guided(choice=("left", "right")),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [pytest.param(name, list(CONTENTS)[i % 4], marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(MADE)],
)
def test_a_structure_begins_where_reasoning_ends(name, content):
    """Plain, drafted, predicted, and all of it again.

    vllm#46118 and #36138: a structure is lost when reasoning ends inside of drafts. vllm#50188: repeats of a request
    whose prefix is cached are other ones.
    """
    chat_format = formats()[name]
    answer = Answer(
        content=CONTENTS[content],
        starts_in_reasoning=chat_format.reasoning is not None and name != "harmony",
        thinking_budget=None if chat_format.reasoning is None else BUDGET,
    )
    guided = structure_of(answer, chat_format)
    sampling = SamplingParams(guided=guided, temperature=1.0, seed=5, max_tokens=MOST, logit_bias=closing())
    (first,) = served(prefix_cache=False).generate(PROMPT, sampling, speculation=asking("none", 0))
    assert first.finish_reason is FinishReason.STOP
    found = joined(read(chat_format, (), first, answer.starts_in_reasoning))
    alone = structure_of(replace(answer, thinking_budget=None), PlainFormat())
    assert served()._compiler.compile(alone).start().advance(codec().encode(found.content, bare=True)) > 0
    assert found.content
    for proposer, num_draft in (("ngram", 8), ("model", 3), ("auto", 1)):
        (again,) = served().generate(PROMPT, sampling, speculation=asking(proposer, num_draft))
        assert_same(again, first)
    (predicted,) = served().generate(PROMPT, sampling, prediction=first.token_ids)
    assert_same(predicted, first)


@pytest.mark.parametrize("name", some(MADE, ["harmony"]))
def test_a_strict_tool_is_called_well_where_it_need_not_be(name):
    """Text or calls as the model likes: equal with drafts, and whatever is a call is a valid one."""
    chat_format = formats()[name]
    answer = Answer(tools=(replace(OTHER, strict=True),))
    guided = structure_of(answer, chat_format)
    params = [SamplingParams(guided=guided, temperature=1.5, seed=seed, max_tokens=60) for seed in range(3)]
    want = [served(prefix_cache=False).generate(PROMPT, p, speculation=asking("none", 0))[0] for p in params]
    got = served().generate([PROMPT] * 3, params, speculation=asking("model", 6))
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
        pieces = read(chat_format, answer.tools, ours, starts_in_reasoning=False)
        if ours.finish_reason is FinishReason.STOP and any(isinstance(piece, CallArguments) for piece in pieces):
            for call in joined(pieces).calls:
                jsonschema.validate(json.loads(call.arguments), json.loads(OTHER.parameters))
