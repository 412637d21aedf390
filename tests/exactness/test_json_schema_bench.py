"""Schemas of others, 500 of JSONSchemaBench: each is refused by name, or gives valid documents, the same with drafts.

What is refused, and why, is told in docs/structures.md, which this module writes when it is run as a program.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from jsonschema.validators import validator_for

from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.params import Guided, SamplingParams
from pilotfish.engine.text.guided import GrammarCompiler
from pilotfish.engine.types import FinishReason, Grammar
from tests.covering import some
from tests.sameness import VOCAB, asking, assert_same, codec, embedded_pair

BENCH, PAGE = Path("tests/data/json_schema_bench.jsonl.gz"), Path("docs/structures.md")
END = 0  # the embedded target's end token
OPTIONS = {"max_model_len": 512, "max_batch_size": 32, "max_batch_tokens": 128, "page_size": 32}
MAX_TOKENS, CLOSING_TOKENS = 400, 5000
MOST_UNFINISHED = 0.05  # of all documents: those of which more is required
MOST_ENDLESS = 0.02  # and those in a string that must hold what a small model does not come to, nor a random walk

HEAD = """# JSON Schemas

Written by `python -m tests.exactness.test_json_schema_bench`; a test compares it with the compiler.

[JSONSchemaBench](https://github.com/guidance-ai/jsonschemabench) collects schemas from repositories, function calls and
interfaces. Of a sample of 500 (how: `tests/data/README.md`) the compiler accepts {accepted}.
It refuses a schema that it cannot enforce in full, with the reason; no keyword is ignored. Generated documents
are valid by `jsonschema`: with every accepted schema in a random walk under its masks, and with every twelfth
with the embedded pair, the same with drafts and without.

Generation is limited to valid documents in these forms:

- no white space around the document, and at most 64 characters of it in a row inside;
- properties in the order of the schema: `properties`, then `required`, then others in any order;
- no escape but `\\"`, `\\\\`, `\\b`, `\\f`, `\\n`, `\\r` and `\\t`, and so no other control character;
- numbers without exponent if they have bounds, `multipleOf` or given values; integers, and multiples of one, without
  decimals; numbers of `const` and `enum` without zeros at the end. Bounds and steps are compared exactly, at any size;
- formats: dates without the year 0; times without the second 60, except at 23:59 UTC; mail
  addresses without quotes, in brackets only IPv4. The others (`hostname`, `ipv4`, `ipv6`, `uuid`,
  `duration`, `uri`) follow their RFC.

A `pattern` is one of ECMA-262 with the flag `u`, and in addition a single `]`, `{{` or `}}` and an escaped character
that needs no escape. Look-around, back-references, `\\b`, flags, and escapes that ECMA-262 does not have (`\\A`,
`\\Z`) are refused.

In a tool that is not strict an unsupported keyword is ignored, with a warning in the log; the other keywords are
enforced.
"""


@cache
def bench() -> list[dict[str, Any]]:
    """Each with the name of its `set`, its own `name` and its `schema`."""
    with gzip.open(BENCH, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(codec(), VOCAB, [END])


def verdicts() -> list[Grammar | str]:
    """What the compiler makes of each, or its reason against it."""
    return [verdict(i) for i in range(len(bench()))]


@cache
def verdict(i: int) -> Grammar | str:
    try:
        return compiler().compile(guided(bench()[i]))
    except InvalidRequest as refusal:
        [violation] = refusal.violations
        assert violation.field == "guided.json_schema"
        return violation.problem.partition("': ")[2].partition(", at #")[0].partition("; expected ")[0]


def guided(entry: Mapping[str, Any]) -> Guided:
    return Guided(json_schema=json.dumps(entry["schema"]))


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_what_is_refused_is_told() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m tests.exactness.test_json_schema_bench`"


def page() -> str:
    refused = [found for found in verdicts() if isinstance(found, str)]
    assert all(refused), "a refusal without a reason"
    return HEAD.format(accepted=len(bench()) - len(refused)) + "".join([*_sets(), *_reasons(refused)])


def _sets() -> Iterator[str]:
    yield "\n| data set | schemas | accepted |\n|---|---|---|\n"
    names = [entry["set"] for entry in bench()]
    accepted = Counter(name for name, found in zip(names, verdicts(), strict=True) if not isinstance(found, str))
    for name, count in Counter(names).items():
        yield f"| {name} | {count} | {accepted[name]} |\n"


def _reasons(refused: Seq[str]) -> Iterator[str]:
    yield "\n| reason for a refusal | schemas | such as |\n|---|---|---|\n"
    for reason, count in sorted(Counter(refused).items(), key=lambda found: (-found[1], found[0])):
        first = bench()[verdicts().index(reason)]
        yield f"| {reason} | {count} | {first['set']}/{first['name']} |\n"


# ------------------------------------------------------------------------------------------------ what is accepted


@cache
def hurry() -> dict[int, float]:
    """Biases that let a small model come to an end: it likes to close, not to open, and neither spaces nor digits."""
    texts = {token: codec().tokenizer.decode([token]) for token in range(VOCAB)}
    return {token: bias for token, text in texts.items() if (bias := _bias(text))}


def _bias(text: str) -> float:
    if not text.strip():
        return -30.0 if text else 0.0
    if set(text) <= {'"'}:
        return 10.0
    if set(text) <= set("]}"):
        return 6.0
    return -10.0 if set(text.strip()) <= set("[{") or any(map(str.isdigit, text)) else 0.0


@cache
def accepted(part: int) -> dict[int, Grammar]:
    """Of one part of the schemas, which lie in it by turns."""
    found = {i: verdict(i) for i in range(part, len(bench()), PARTS)}
    return {i: grammar for i, grammar in found.items() if not isinstance(grammar, str)}


def asked(i: int) -> tuple[str, SamplingParams]:
    """The prompt, cut differently for each, and half of them greedy."""
    sampling = SamplingParams(
        guided=guided(bench()[i]), temperature=i % 2, seed=i, max_tokens=MAX_TOKENS, logit_bias=hurry()
    )
    return "import json\n\nprint(json.dumps(value)) # -> "[i % 20 :], sampling


def generate(llm: LLM, proposer: str, which: Iterable[int]) -> list[CompletionOutput]:
    prompts, params = zip(*map(asked, which), strict=True)
    return llm.generate(list(prompts), list(params), speculation=asking(proposer, 4))


@cache
def plain(part: int) -> dict[int, CompletionOutput]:
    done = generate(embedded_pair().llm("none", **OPTIONS, prefix_cache=False), "none", accepted(part))
    return dict(zip(accepted(part), done, strict=True))


PARTS = 48


@pytest.mark.slow
def test_a_walk_under_each_schema_ends_in_a_valid_document() -> None:
    """Without a model: any token that the masks allow, until the document is whole."""
    endless = 0
    for i, grammar in enumerate(verdicts()):
        if isinstance(grammar, str):
            continue
        text = closed(grammar, ())
        endless += not text
        problem = problem_of(text, bench()[i]["schema"]) if text else None
        assert problem is None, f"{bench()[i]['name']}: {problem}"
    assert endless <= MOST_ENDLESS * len(bench())


@pytest.mark.parametrize("part", some([0, 1, 2, 3], [0]))
def test_what_is_accepted_gives_valid_documents(part: int) -> None:
    unfinished, endless = 0, 0
    for i, done in plain(part).items():
        name, text = "{set}/{name}".format_map(bench()[i]), done.text or ""
        assert done.error is None, name
        if done.finish_reason is FinishReason.LENGTH:
            unfinished, text = unfinished + 1, closed(accepted(part)[i], done.token_ids)
        endless += not text
        problem = problem_of(text, bench()[i]["schema"]) if text else None
        assert problem is None, f"{name}: {problem}"
    assert unfinished <= max(2, MOST_UNFINISHED * len(accepted(part)))
    assert endless <= max(1, MOST_ENDLESS * len(accepted(part)))


def problem_of(text: str, schema: Any) -> str | None:
    """What is wrong with a document, by the draft that its schema names, formats included."""
    draft = validator_for(schema, default=jsonschema.Draft202012Validator)
    errors = draft(schema, format_checker=draft.FORMAT_CHECKER).iter_errors(json.loads(text))
    return next((error.message for error in errors), None)


def closed(grammar: Grammar, tokens: Seq[int]) -> str:
    """The document of which these tokens are the beginning, ended as soon as its structure lets it end.

    Where nothing closes, every other token is any: a pattern may want what the bias is against. Empty if that fails.
    """
    state, mask, rng, longer = grammar.start(), torch.empty(VOCAB, dtype=torch.bool), random.Random(0), list(tokens)
    bias = torch.tensor([hurry().get(token, 0.0) for token in range(VOCAB)])
    assert state.advance(longer) == len(longer), "the mask had forbidden what was written"
    for _ in range(CLOSING_TOKENS):
        state.fill(mask)
        if mask[END]:
            return codec().tokenizer.decode(longer)
        allowed = bias.masked_fill(~mask, -torch.inf)
        wanted = (allowed == allowed.max()) if allowed.max() > 0 or rng.random() < 0.5 else mask
        longer.append(rng.choice(wanted.nonzero().flatten().tolist()))
        assert state.advance(longer[-1:]) == 1
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("part", "proposer"), [(0, "model"), (1, "suffix"), (2, "ngram"), (3, "auto")])
def test_what_is_accepted_is_the_same_with_drafts(part: int, proposer: str) -> None:
    which = list(accepted(part))
    got = generate(embedded_pair().llm(proposer, **OPTIONS), proposer, which)
    for ours, i in zip(got, which, strict=True):
        assert_same(ours, plain(part)[i])
    assert sum(done.stats.accepted for done in got) > 0, "no draft was kept, so nothing was shown"


# --------------------------------------------------------------------------------------- what these schemas brought up


@pytest.mark.parametrize(("kind", "time"), [("date", ""), ("date-time", "T12:00:00Z")])
def test_a_date_is_one_of_the_calendar(kind: str, time: str) -> None:
    """The 29th of February was allowed in every year, and the year 0, which Python's and most other dates lack."""
    grammar = compiler().compile(Guided(json_schema=json.dumps({"type": "string", "format": kind})))
    for year in (0, 1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 2104, 9999):
        for day in ("01-31", "02-28", "02-29", "02-30", "04-30", "04-31", "12-31", "13-01"):
            written = f"{year:04}-{day}"
            assert fits(grammar, json.dumps(written + time)) == _is_date(written), written


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def fits(grammar: Grammar, text: str) -> bool:
    """Whether it may be written, and may end there."""
    state, tokens, mask = grammar.start(), codec().encode(text), torch.empty(VOCAB, dtype=torch.bool)
    if state.advance(tokens) < len(tokens):
        return False
    state.fill(mask)
    return bool(mask[END])


def test_only_schemas_have_formats() -> None:
    """A property of the name, or a constant that looks like a schema, is left as it is."""
    constant = {"format": "date"}
    schema = {"properties": {"format": {"const": constant}, "enum": {"type": "string", "format": "date"}}}
    grammar = compiler().compile(Guided(json_schema=json.dumps(schema)))
    for day, is_date in (("2024-02-29", True), ("2023-02-29", False)):
        assert fits(grammar, json.dumps({"format": constant, "enum": day})) == is_date


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
