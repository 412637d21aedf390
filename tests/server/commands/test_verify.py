"""`pilotfish verify`: a server that keeps the law passes; each planted fault is found, and named by where it shows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from pilotfish.client.convert import completion, model_info
from pilotfish.engine.errors import Unsupported
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.server import cli
from pilotfish.server.commands.arguments import read_prompts
from pilotfish.server.commands.verify import (
    WAYS,
    VerifyCase,
    VerifyJob,
    VerifyReport,
    VerifySetting,
    as_text,
    cases,
    company,
    default_prompts,
    first_difference,
    largest_gap,
    settings,
)
from pilotfish.server.grpc import messages
from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.fake_grammar import FakeCompiler
from tests.serving import serving, serving_embedded

QUICK = ["--tokens", "8", "--company", "4"]
FEW = {"num_draft_tokens": 1}
SMALL = {**FEW, "max_model_len": 256, "max_batch_tokens": 64, "max_batch_size": 16}
PROMPTS = "def mean(values):\n    \nOne, two, three. One, two, three. One,\n"


async def verify(server, *options):
    return await asyncio.to_thread(cli.main, ["verify", f"127.0.0.1:{server.app.grpc_port}", *options])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return ["--prompts", str(path)]


async def report_of(capsys, server, *options):
    """What is found, for machines; the exit code says whether answers differ."""
    code = await verify(server, *QUICK, *options, "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == int(not report["equal"]) == int(bool(report["differences"]))
    for difference in report["differences"]:
        assert difference["first"]["expected"] != difference["first"]["found"]
    return report


# ------------------------------------------------------------------------------------------ a server that keeps the law


@pytest.mark.slow
async def test_the_embedded_pair_gives_equal_answers(capsys, prompts):
    async with serving_embedded(**SMALL) as server:
        proposers = server.app.driver.model.engine.facts.proposer_names
        assert await verify(server, *QUICK, *prompts) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[4:]]
    assert "All " in out.splitlines()[-1]
    assert "under rejection only greedy answers are compared" in out
    assert {"none", "ngram", "suffix", "model", "auto"} <= set(proposers) <= {row[0] for row in rows if row}
    model = next(row for row in rows if row[:2] == ["model", "K=1"])
    assert int(model[-1]) > 0, "drafts were accepted"


async def test_under_rejection_only_greedy_answers_are_compared(capsys, prompts):
    """Sampled ones would differ: they depend on the drafts."""
    async with serving(compile_grammar=FakeCompiler(), **FEW) as server:
        report = await report_of(capsys, server, *prompts)
    assert report["equal"]
    compared = {(row["proposer"], row["drafts"]): row["compared"]["alone"] for row in report["rows"]}
    greedy = ["greedy, prompt 1", "greedy, prompt 2", "JSON schema", "stop token", "stop string"]
    assert compared["ngram", "K=1, rejection"] == len(greedy) < compared["ngram", "K=1"]


def test_after_three_rounds_every_answer_came_in_every_way():
    every = settings(info(), with_rejection=True)
    wanted = cases([(1, 2), (3, 4, 5)], 8, output((5, 6), (-1.0, -0.5)))
    rounds = [list(company(every, wanted, "run", number, Random(0))) for number in range(3)]
    for setting in every:
        mine = [job for jobs in rounds for job in jobs if job.setting == setting]
        asked = {job.case.name for job in mine}
        assert {(job.case.name, job.way) for job in mine} == set(product(asked, WAYS[1:]))
        assert len(asked) == sum(case.is_greedy for case in wanted) if setting.rule == "rejection" else len(wanted)
    assert {job.salt == "run" for job in rounds[0]} == {True, False}


async def test_a_reproducible_server_promises_bits(capsys, prompts):
    engine = Faulty()
    engine.refused = lambda asked: asked.verification == "rejection"  # by which such a server is known
    async with serving(engine, **FEW) as server:
        report = await report_of(capsys, server, *prompts)
    assert (report["reproducible"], report["tolerance"], report["largest_logprob_difference"]) == (True, 0.0, 0.0)
    assert report["equal"]
    assert not any("rejection" in row["drafts"] for row in report["rows"])


async def test_without_a_tokenizer_prompts_are_token_ids(capsys):
    async with serving(codec=None, **FEW) as server:
        assert await verify(server, *QUICK) == 0
    out = capsys.readouterr().out
    left = [line.split(",")[0] for line in out.splitlines() if line.startswith("skipped: ")]
    assert left == ["skipped: JSON schema", "skipped: regex", "skipped: choice"]


# ------------------------------------------------------------------------------------------------------ planted faults


class Faulty(FakeEngine):
    """An engine with a fault: the last token of a step is another one where it says so."""

    def __init__(self):
        super().__init__(burst=2, step_seconds=0.005)  # so that requests meet
        self.is_wrong = lambda live, request, fresh: False
        self.refused = lambda speculation: False

    def check(self, request):
        super().check(request)
        if self.refused(request.speculation):
            raise Unsupported(f"{request.speculation} is not served")

    def _fresh(self, live):
        fresh, reason, stop = super()._fresh(live)
        if self.is_wrong(self._live, live.request, fresh):
            fresh[-1] = (fresh[-1] + 1) % self.vocab_size
        return fresh, reason, stop


def a_draft_too_many(engine, monkeypatch):
    engine.is_wrong = lambda _, request, fresh: request.speculation.mode != "off" and len(fresh) > 1


def noise_by_the_place_in_the_batch(engine, monkeypatch):
    engine.is_wrong = lambda live, request, _: [*live].index(request.request_id) > 0


def a_token_that_is_sent_again(engine, monkeypatch):
    right = messages._received

    def without_last(*asked):
        output = right(*asked)
        return replace(output, token_ids=output.token_ids[:-1])

    monkeypatch.setattr(messages, "_received", without_last)


def a_character_that_streams_lose(engine, monkeypatch):
    right = messages._of_event

    def without_last(event, asked):
        for message in right(event, asked):
            if len(message.delta.token_ids) > 1:
                message.delta.text = message.delta.text[:-1]
            yield message

    monkeypatch.setattr(messages, "_of_event", without_last)


def a_refusal(engine, monkeypatch):
    engine.refused = lambda asked: asked.mode == "auto"


@pytest.mark.parametrize(
    ("plant", "proposers", "ways", "what"),
    [
        (a_draft_too_many, {"ngram"}, set(WAYS), "token"),
        (noise_by_the_place_in_the_batch, {"none", "ngram"}, {*WAYS} - {"alone"}, "token"),
        (a_token_that_is_sent_again, {"none", "ngram"}, {"resumed"}, None),
        (a_character_that_streams_lose, {"none", "ngram"}, {"streamed", "resumed"}, "text"),
        (a_refusal, {"ngram"}, set(WAYS), "answer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_fault_is_found_where_it_shows(capsys, prompts, monkeypatch, plant, proposers, ways, what):
    async with serving(engine := Faulty(), **FEW) as server:
        plant(engine, monkeypatch)
        report = await report_of(capsys, server, *prompts)
    assert {difference["proposer"] for difference in report["differences"]} == proposers
    assert {difference["way"] for difference in report["differences"]} == ways
    assert what is None or {difference["first"]["what"] for difference in report["differences"]} == {what}


@pytest.mark.slow
async def test_a_stale_row_of_keys_is_found_after_drafts(capsys, prompts, monkeypatch):
    """After a pass with drafts the row of a sequence's newest token holds again what was there before the pass."""
    right = ModelRunner.forward

    def forward(runner, feeds):
        arena = runner.arena
        with_drafts = [feed for feed in feeds if 1 < feed.num_logits == len(feed.tokens)]
        places = [feed.page_table[feed.start // arena.page_size] * arena.page_size for feed in with_drafts]
        rows = [at + feed.start % arena.page_size for at, feed in zip(places, with_drafts, strict=True)]
        before = [(layer, layer[rows].clone()) for layer in (*arena.k, *arena.v)] if rows else []
        logits = right(runner, feeds)
        for layer, kept in before:
            layer[rows] = kept
        return logits

    async with serving_embedded(**SMALL | {"draft": None}) as server:
        monkeypatch.setattr(ModelRunner, "forward", forward)
        report = await report_of(capsys, server, *prompts)
    found = {difference["proposer"] for difference in report["differences"]}
    assert found
    assert found <= {"ngram", "suffix"}


# --------------------------------------------------------------------------------------- servers that cannot be asked


async def test_over_tls(capsys, papers, tmp_path):
    async with serving(tls_cert=papers.server_cert, tls_key=papers.server_key, **FEW) as server:
        assert await verify(server, "--tokens", "2", "--tls-ca", str(papers.authority)) == 0
        assert await verify(server) == 2, "in the clear"
        assert await verify(server, "--tls-ca", str(tmp_path / "none")) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("All ")


async def test_a_prompt_that_the_server_refuses(capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a b\n" + "a b " * 5000)
    async with serving(**FEW) as server:
        assert await verify(server, *QUICK, "--prompts", str(path)) == 0
    left = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped: ")]
    assert any("prompt 2: INVALID_ARGUMENT" in line for line in left)
    assert not any("greedy, prompt 1" in line for line in left)


@pytest.mark.parametrize("option", ["--tokens", "--company", "--rounds"])
def test_numbers_below_one_are_refused(option, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", option, "0"])
    assert end.value.code == 2
    assert f"{option}: is 0; expected at least 1" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- the report


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.1)])
def test_what_is_promised_depends_on_the_type(dtype, tolerance):
    report = VerifyReport(info(dtype=dtype), is_reproducible=False)
    assert report.tolerance == tolerance
    assert f"except for near-ties, and log-probabilities within {tolerance:g}" in as_text(report)


def test_the_report_names_differences_and_rows_without_drafts():
    report = VerifyReport(info(), is_reproducible=False)
    case = VerifyCase("greedy, prompt 1", (1,), {})
    found = {"fixed": output((5, 9), (-1.0, -0.5)), "auto": output((5, 8), (-1.0, -0.5)), "off": WANT}
    for mode, got in found.items():
        setting = VerifySetting("none" if mode == "off" else "ngram", mode, 2 if mode == "fixed" else None)
        report.add(VerifyJob(setting, case, "streamed", "salt"), (WANT,), (got,))
    lines = as_text(report).splitlines()
    head = ["proposer", "drafts", "alone", "in", "company", "streamed", "resumed", "tokens", "drafted", "accepted"]
    assert lines[3].split() == head
    assert lines[4].split() == ["ngram", "K=2", "0/0", "0/0", "0/1", "0/0", "2", "0", "0"]
    assert lines[-5:] == [
        "ngram K=2 drafted nothing, so its row does not test drafts",
        "ngram auto drafted nothing, so its row does not test drafts",
        "different: ngram K=2, streamed: greedy, prompt 1, output 0, token 1: token expected 6, found 9",
        "different: ngram auto, streamed: greedy, prompt 1, output 0, token 1: token expected 6, found 8 (a near-tie)",
        "2 of 3 answers differ, 1 of them by near-ties; log-probabilities differ by at most 0.",
    ]


def test_the_text_lists_fifty_differences():
    report = VerifyReport(info(), is_reproducible=False)
    for number in range(52):
        job = VerifyJob(VerifySetting("ngram", "auto"), VerifyCase(f"case {number}", (1,), {}), "alone", "salt")
        report.add(job, (WANT,), (output((5, 9), (-1.0, -0.5)),))
    different = [line for line in as_text(report).splitlines() if line.startswith("different: ")]
    assert different[50:] == ["different: 2 more; --json lists all"]
    assert "case 49" in different[49]
    assert len(report.as_dict()["differences"]) == 52


# -------------------------------------------------------------------------------------------------------- the prompts


def encode(text):
    return tuple(map(ord, text))


def test_prompts_of_a_file(tmp_path):
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text("ab\n\n{c\n")
    assert read_prompts(lines, encode) == [encode("ab"), encode("{c")]
    objects.write_text('{"prompt": "a\\nb"}\n{"token_ids": [5, 6]}\n"c"\n')
    assert read_prompts(objects, encode) == [encode("a\nb"), (5, 6), encode("c")]
    with pytest.raises(ValueError, match=r"lines\.txt, prompt 1 is text, but there is no tokenizer"):
        read_prompts(lines, None)


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "7",
        '{"token_ids": []}',
        '{"token_ids": [-1]}',
        '{"text": "a"}',
        '{"prompt": ""}',
        "{",
        '{"messages": []}',
    ],
)
def test_a_line_that_is_no_prompt(tmp_path, line):
    path = tmp_path / "odd.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"odd\.jsonl, prompt 1"):
        read_prompts(path, encode)


def info(**changed):
    usual = {"model": "m", "device": "cpu", "dtype": "float32", "vocab_size": 99, "max_model_len": 1000}
    limits = {"max_batch_tokens": 100, "speculation": pb.SpeculationOptions(num_draft_tokens=5)}
    message = control.GetModelInfoResponse(proposers=("auto", "ngram", "none"), **usual | limits | changed)
    return model_info(message)


@pytest.mark.parametrize("tokenize", [encode, None], ids=["text", "token ids"])
def test_the_longest_prompt_is_fed_in_chunks_where_the_context_has_room(tokenize):
    lengths = list(map(len, default_prompts(info(), 8, tokenize)))
    assert len(set(lengths)) == len(lengths)
    assert lengths[-1] > info().max_batch_tokens
    assert max(map(len, default_prompts(info(max_model_len=50), 8, tokenize))) <= 50 - 8


def test_every_proposer_with_every_number_of_drafts():
    names = [(setting.proposer, setting.drafts) for setting in settings(info(), with_rejection=True)]
    drafts = ["K=1", "K=2", "K=4", "K=5", "auto", "K=5, rejection"]
    assert names == [("none", "off"), *[(who, number) for who in ("auto", "ngram") for number in drafts]]


# ---------------------------------------------------------------------------------------------- the first difference


def output(tokens, logprobs, top=(), text="text", reason=pb.FINISH_REASON_LENGTH):
    """One output; `top` are the likeliest tokens at its last position."""
    found = [pb.TokenLogprob(logprob=logprob) for logprob in logprobs]
    found[-1].top.extend(pb.Candidate(token_id=token, logprob=logprob) for token, logprob in top)
    finished = pb.Finished(finish_reason=reason, usage=pb.Usage(completion_tokens=len(tokens)))
    message = pb.Output(text=text, token_ids=tokens, logprobs=found, finished=finished)
    return completion(pb.GenerateResponse(outputs=[message])).outputs[0]


WANT = output((5, 6), (-1.0, -0.5), top=((6, -0.5), (8, -0.50005), (9, -2.0)))
OTHERS = {
    "equal": (output((5, 6), (-1.00005, -0.5)), None),
    "a log-probability": (output((5, 6), (-1.001, -0.5)), ("log-probability", 0, False)),
    "not a number": (output((5, 6), (float("nan"), -0.5)), ("log-probability", 0, False)),
    "a near-tie": (output((5, 8), (-1.0, -0.5)), ("token", 1, True)),
    "a near-tie after other log-probabilities": (output((5, 8), (-1.001, -0.5)), ("token", 1, False)),
    "a token far below": (output((5, 9), (-1.0, -0.5)), ("token", 1, False)),
    "an unlikely token": (output((5, 10), (-1.0, -0.5)), ("token", 1, False)),
    "too short": (output((5,), (-1.0,)), ("token", 1, False)),
    "too long": (output((5, 6, 7), (-1.0, -0.5, -1.0)), ("token", 2, False)),
    "another text": (output((5, 6), (-1.0, -0.5), text="texts"), ("text", None, False)),
    "another end": (output((5, 6), (-1.0, -0.5), reason=pb.FINISH_REASON_STOP), ("end", None, False)),
    "a missing log-probability": (
        replace(WANT, logprobs=WANT.logprobs[:1]),
        ("number of log-probabilities", None, False),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference(name):
    got, expected = OTHERS[name]
    first = first_difference((WANT,), (got,), 1e-4, is_greedy=True)
    assert (first and (first.what, first.position, first.is_near_tie)) == expected


def test_a_near_tie_is_one_of_greedy_answers_within_the_tolerance():
    got = output((5, 8), (-1.0, -0.5))
    for tolerance, is_greedy in ((1e-4, False), (0.0, True), (1e-5, True)):
        assert not first_difference((WANT,), (got,), tolerance, is_greedy=is_greedy).is_near_tie


def test_another_number_of_outputs():
    assert first_difference((WANT,), (WANT, WANT), 1e-4, is_greedy=True).what == "number of outputs"


def test_the_largest_gap_is_of_equal_tokens():
    assert largest_gap((WANT,), (output((5, 8), (-1.25, -9.0)),)) == 0.25
