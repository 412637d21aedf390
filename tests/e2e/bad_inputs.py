"""Bad inputs, each with what both doors have to say of it: a field, its value and a status. Data only.

Most are made after published vulnerabilities of servers of this kind: numbers that are none, ids beyond the logits,
counts without a bound, structures that never end, text that is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pilotfish.v1 import generation_pb2 as pb

HUGE = 2**32 - 1


@dataclass(frozen=True)
class Bad:
    """One bad request: as a message, as a body of `/v1/completions`, or both; what is said names field and value."""

    field: str  # as the protocol names it
    said: str
    grpc: dict[str, Any] | None = None
    http: dict[str, Any] | bytes | None = None
    code: str = "INVALID_ARGUMENT"
    status: int = 400
    http_field: str | None = None  # where HTTP has another name

    @property
    def param(self) -> str:
        """The field as HTTP names it."""
        return self.http_field or self.field.split(".", 1)[-1]


def numbers() -> Iterator[Bad]:
    """Reals beyond their range, and what is no number at all."""
    nowhere = [math.nan, math.inf, -math.inf]
    wrong = {
        "temperature": [*nowhere, -1.0, -1e-9, 100.5, 1e308],
        "top_p": [*nowhere, -1.0, 1.5],
        "min_p": [*nowhere, -0.5, 1.5],
        "repetition_penalty": [*nowhere, 0.0, -1.0, 10.5],
        "presence_penalty": [*nowhere, 2.5, -2.5],
        "frequency_penalty": [*nowhere, 2.5, -2.5, 1e308],
    }
    for name, values in wrong.items():
        for value in values:
            sampling = pb.SamplingParams(**{name: value})
            yield Bad(f"sampling.{name}", str(value), {"sampling": sampling}, {name: value})


def counts(vocab: int, room: int) -> Iterator[Bad]:
    """Counts of nothing, and of too much."""
    for n in (0, 65, HUGE):
        yield Bad("sampling.n", str(n), {"sampling": pb.SamplingParams(n=n)}, {"n": n})
    for most in (0, room + 1, 2**31, HUGE):
        stopping = pb.StoppingParams(max_tokens=most)
        yield Bad("stopping.max_tokens", str(most), {"stopping": stopping}, {"max_tokens": most})
    for least, most in ((5, 4), (HUGE, None), (room + 1, None), (HUGE, 4)):
        stopping = pb.StoppingParams(min_tokens=least, max_tokens=most)
        body = {"min_tokens": least} | ({} if most is None else {"max_tokens": most})
        yield Bad("stopping.min_tokens", str(least), {"stopping": stopping}, body)
    for top in (21, vocab, HUGE):
        output = pb.OutputOptions(logprobs=True, top_logprobs=top)
        yield Bad("output.top_logprobs", str(top), {"output": output}, {"logprobs": top}, http_field="logprobs")
    yield Bad("output.top_logprobs", "5", {"output": pb.OutputOptions(top_logprobs=5)})
    asked = {"output": pb.OutputOptions(logprobs=True, top_logprobs=20), "sampling": pb.SamplingParams(n=64)}
    many = {"stopping": pb.StoppingParams(max_tokens=400)} | asked
    yield Bad("output.logprobs", "537600", many, {"logprobs": 20, "n": 64, "max_tokens": 400})
    yield Bad("output.stream_interval", "0", {"output": pb.OutputOptions(stream_interval=0)})
    for drafts in (17, HUGE):
        asked = {"speculation": pb.SpeculationOptions(num_draft_tokens=drafts)}
        body = {"speculation": {"num_draft_tokens": drafts}}
        yield Bad("speculation.num_draft_tokens", str(drafts), asked, body, http_field="speculation.num_draft_tokens")
    for priority in (101, -101, 2**31 - 1, -(2**31)):
        yield Bad("priority", str(priority), {"priority": priority}, {"priority": priority})


def stops(vocab: int) -> Iterator[Bad]:
    """Stop strings and stop tokens."""
    for texts, field, said in (
        (["x"] * 17, "stopping.stop", "17"),
        (["x"] * 10_000, "stopping.stop", "10000"),
        ([""], "stopping.stop[0]", "0 characters"),
        (["a", ""], "stopping.stop[1]", "0 characters"),
        (["y" * 257], "stopping.stop[0]", "257"),
        (["€" * 100_000], "stopping.stop[0]", "100000"),
    ):
        yield Bad(field, said, {"stopping": pb.StoppingParams(stop=texts)}, {"stop": texts})
    many = pb.StoppingParams(stop_token_ids=[1] * 17)
    yield Bad("stopping.stop_token_ids", "17", {"stopping": many}, {"stop_token_ids": [1] * 17})


def tokens(vocab: int) -> Iterator[Bad]:
    """Ids beyond the logits, wherever ids can stand."""
    for token in (vocab, vocab + 1000, 2**31, HUGE):
        said, ids = str(token), pb.TokenIds(ids=[1, token])
        yield Bad("token_ids[1]", said, {"token_ids": ids}, {"prompt": [1, token]}, http_field="prompt[1]")
        stopping = pb.StoppingParams(stop_token_ids=[token])
        yield Bad("stopping.stop_token_ids[0]", said, {"stopping": stopping}, {"stop_token_ids": [token]})
        banned = pb.SamplingParams(banned_token_ids=[1, token])
        yield Bad("sampling.banned_token_ids[1]", said, {"sampling": banned}, {"banned_token_ids": [1, token]})
        allowed = pb.SamplingParams(allowed_token_ids=ids)
        yield Bad("sampling.allowed_token_ids[1]", said, {"sampling": allowed}, {"allowed_token_ids": [1, token]})
        bias = pb.SamplingParams(logit_bias={token: 1.0})
        yield Bad(f"sampling.logit_bias[{token}]", said, {"sampling": bias}, {"logit_bias": {said: 1.0}})
    for bias in (math.nan, math.inf, -math.inf, 100.5, -1e308):
        sampling = pb.SamplingParams(logit_bias={7: bias})
        finite = math.isfinite(bias)
        name = "logit_bias[7]" if finite else "logit_bias.7"
        body = {"logit_bias": {"7": bias}}
        yield Bad("sampling.logit_bias[7]", str(bias), {"sampling": sampling}, body, http_field=name)
    many = dict.fromkeys(range(1025), 1.0)
    body = {"logit_bias": {str(token): 1.0 for token in many}}
    yield Bad("sampling.logit_bias", "1025", {"sampling": pb.SamplingParams(logit_bias=many)}, body)
    for ids in ([], [5]):
        sampling = pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=ids), banned_token_ids=[5])
        body = {"allowed_token_ids": ids, "banned_token_ids": [5]}
        yield Bad("sampling.allowed_token_ids", str(len(ids)), {"sampling": sampling}, body)
    repeated = [3] * (vocab + 1)
    sampling = pb.SamplingParams(banned_token_ids=repeated)
    yield Bad("sampling.banned_token_ids", str(vocab + 1), {"sampling": sampling}, {"banned_token_ids": repeated})


def prompts(longest: int) -> Iterator[Bad]:
    """Too little of it, and too much."""
    yield Bad("prompt", "empty", {"prompt": ""}, {"prompt": ""})
    yield Bad("prompt", "empty", {"token_ids": pb.TokenIds()}, {"prompt": []})
    long = [1] * longest
    yield Bad("prompt", str(longest), {"token_ids": pb.TokenIds(ids=long)}, {"prompt": long})
    text = "x = 1\n" * 100_000
    yield Bad("prompt", "the limit is", {"prompt": text}, {"prompt": text})
    yield Bad("messages", "0 messages", {"messages": pb.ChatMessages()})
    yield Bad("input", "missing", {})
    many = [1] * (longest + 2)
    yield Bad(
        "prediction", "the limit is", {"prompt": "a", "prediction": pb.Prediction(token_ids=pb.TokenIds(ids=many))}
    )
    yield Bad(
        "prediction", "the limit is", {"prompt": "a", "prediction": pb.Prediction(text=text)}, {"prediction": text}
    )
    yield Bad("prediction", "is empty", {"prompt": "a", "prediction": pb.Prediction()})


def conversations() -> Iterator[Bad]:
    """Tools, and what the template is given."""
    turn, tool = pb.ChatMessage(role="user", content="hi"), pb.Tool(name="f")

    def chat(**fields: Any) -> dict[str, Any]:
        return {"messages": pb.ChatMessages(messages=[turn], **fields)}

    strict = pb.Tool(name="f", strict=True, parameters='{"type": "nothing"}')
    for field, said, asked in (
        ("messages.tools[0].name", "'a b'", chat(tools=[pb.Tool(name="a b")])),
        ("messages.tools[1].name", "twice", chat(tools=[tool, tool])),
        ("messages.tools[0].parameters", "'['", chat(tools=[pb.Tool(name="f", parameters="[")])),
        ("messages.tools[0].parameters", "nothing", chat(tools=[strict])),
        ("messages.tools", "1025 functions", chat(tools=[tool] * 1025)),
        ("messages.tool_choice.name", "'g'", chat(tools=[tool], tool_choice=pb.ToolChoice(name="g"))),
        ("messages.tool_choice.mode", "requires", chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED))),
        ("messages.tool_choice.mode", "79", chat(tool_choice=pb.ToolChoice(mode=79))),
        ("messages.template_arguments", "'{'", chat(template_arguments="{")),
        ("messages.template_arguments", "'tools'", chat(template_arguments='{"tools": 1}')),
        ("messages.add_generation_prompt", "true", chat(add_generation_prompt=True, continue_final_message=True)),
        ("messages.thinking_budget", "5", chat(thinking_budget=5)),
    ):
        yield Bad(field, said, asked)


def names() -> Iterator[Bad]:
    """Ids, salts, models and proposers."""
    for name in ("", "a b", "a/b", "../x", "a\n", "\x00", "é", "x" * 129, "x" * 10**6, "tenant/id"):
        yield Bad("request_id", repr(name)[:30], {"request_id": name})
    for salt in ("", "s" * 257, "s" * 10**6):
        yield Bad("cache_salt", str(len(salt)), {"cache_salt": salt}, {"cache_salt": salt})
    for model in ("other", "", "../../etc/passwd", "m" * 10**6):
        said = repr(model)[:30]
        yield Bad("model", said, {"model": model}, {"model": model}, code="NOT_FOUND", status=404)
    for proposer in ("oracle", "", "p" * 10**6):
        asked = {"speculation": pb.SpeculationOptions(proposer=proposer)}
        body = {"speculation": {"proposer": proposer}}
        yield Bad("speculation.proposer", repr(proposer)[:30], asked, body, code="UNIMPLEMENTED")
    yield Bad("speculation.mode", "77", {"speculation": pb.SpeculationOptions(mode=77)})
    yield Bad("speculation.verification", "78", {"speculation": pb.SpeculationOptions(verification=78)})


def structures() -> Iterator[Bad]:
    """Sources that are none, that are too large, or that would never be done."""
    yield Bad("guided", "none", {"guided": pb.GuidedDecoding()})
    for kind, source, said in (
        ("regex", "(", "("),
        ("regex", "[a", "[a"),
        ("regex", r"(a)\1", "(a)"),
        ("regex", "(?=a)b", "(?=a)b"),
        ("regex", "x" * 65_537, "65537"),
        ("json_schema", "{", "{"),
        ("json_schema", '{"type": "nothing"}', "nothing"),
        ("json_schema", '{"type": "string", "pattern": "["}', "pattern"),
        ("json_schema", '{"type": "integer", "multipleOf": 999983}', "multipleOf"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", "[" * 30_000, "["),
        ("grammar", "start: missing", "missing"),
        ("grammar", "start: start", "start"),
        ("grammar", "", ""),
    ):
        named = "guided_json" if kind == "json_schema" else f"guided_{kind}"
        asked = {"guided": pb.GuidedDecoding(**{kind: source})}
        yield Bad(f"guided.{kind}", said, asked, {named: source}, http_field=named)
    for choices, said in (([], "0 texts"), (["x"] * 4097, "4097")):
        asked = {"guided": pb.GuidedDecoding(choice=pb.Choice(choices=choices))}
        yield Bad("guided.choice", said, asked, {"guided_choice": choices}, http_field="guided_choice")
    asked = {"guided": pb.GuidedDecoding(regex="a"), "stopping": pb.StoppingParams(ignore_eos=True)}
    yield Bad("stopping.ignore_eos", "true", asked, {"guided_regex": "a", "ignore_eos": True})


def json_types() -> Iterator[Bad]:
    """What only JSON can get wrong: other types than the field's."""
    wrong: dict[str, list[Any]] = {
        "temperature": ["1", True, [], {}],
        "top_k": [-1, 1.5, "3", True, 2**32, 2**64, 10**400],
        "n": [-1, 1.5, "3", True, 2**32],
        "max_tokens": [-1, 1e3, "9"],
        "seed": [-(2**63) - 1, 2**64, 1.5, "7"],
        "stop": [5, {}],
        "stop_token_ids": ["x", 5],
        "logit_bias": [[], 5],
        "ignore_eos": ["yes", 1],
        "stream": [1, "true"],
        "prompt": [5, {"a": 1}, ["a"] * 129],
        "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}],
        "speculation": ["auto", 5],
        "stream_options": [True],
        "echo": ["yes", 1],
        "prediction": [5],
        "best_of": [2],
        "tools": [[{"type": "function"}]],
        "suffix": ["x"],
        "temprature": [1],
        "__proto__": [{}],
    }
    for name, values in wrong.items():
        for value in values:
            body = {"prompt": "a"} | {name: value}
            param = f"{name}.type" if value == {"type": "xml"} else name
            yield Bad(param, "", http=body, http_field=param)
    for place, param in ((["x", -1], "stop[1]"), ([1], "stop[0]")):
        yield Bad(param, str(place[-1]), http={"stop": place}, http_field=param)
    for ids in ([-1], [1.5], [2**32], ["a"]):
        yield Bad("stop_token_ids[0]", "", http={"stop_token_ids": ids}, http_field="stop_token_ids[0]")
    for key in ("x", "-1", "1.5", "4294967296"):
        yield Bad("logit_bias", key, http={"logit_bias": {key: 1}}, http_field=f"logit_bias.{key}")
    yield Bad("prompt", "missing", http=b"{}", http_field="prompt")
    yield Bad("prompt", "missing", http=b'{"prompt": null}', http_field="prompt")


def json_text() -> Iterator[Bad]:
    """Bodies that are no JSON, and JSON that spells what is no text."""
    for raw in (b"{", b"\xff\xfe", b'{"prompt": "a"} x', b"{'prompt': 'a'}", b"prompt=a", b"\x00", b"NaN", b"[]", b"7"):
        yield Bad("body", "", http=raw, http_field="body")
    yield Bad("body", "too deep", http=b"[" * 200_000, http_field="body")
    yield Bad("body", "number", http=b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", http_field="body")
    for name in ("prompt", "model", "cache_salt", "guided_regex", "guided_grammar", "guided_json"):
        body = b'{"prompt": "a", "%s": "x\\ud800"}' % name.encode()
        yield Bad(name, "'\\ud800'", http=body, http_field=name)
    yield Bad("stop[0]", "'\\udc00'", http=b'{"prompt": "a", "stop": "\\udc00"}', http_field="stop[0]")
    deep = b'{"prompt": ' + b"[" * 800 + b"]" * 800 + b"}"
    yield Bad("prompt[0][0]", "[[", http=deep, http_field="prompt[0][0]")


def every(vocab: int, room: int) -> list[Bad]:
    """All of them, for a model of this vocabulary and a prompt of one token that leaves this much room."""
    parts = [
        numbers(), counts(vocab, room), stops(vocab), tokens(vocab), prompts(room + 1), names(), structures(),
        conversations(), json_types(), json_text(),
    ]  # fmt: skip
    return [bad for part in parts for bad in part]


RAW = [  # bytes that are no message of this method
    b"\x0a", b"\x0a\xff", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x1a\x02\xff\xfe", b"\x1a\x03\xed\xa0\x80",
    b"\x07", b"\x00", b"\x32\x05\x09", b"\x22\x03\x0a\x01\xff", b"\xff" * 64, b"\x1a\x02\xc0\x80",
    b"not protobuf at all",
]  # fmt: skip
