"""The largest calls within the size limit, of many kinds, sent by a separate process.

`python -m loadtest.experiments.hostile GRPC HTTP` reads one name per line, sends that call `AT_ONCE` times
concurrently, and prints how the calls ended.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import httpx

from pilotfish.v1 import control_pb2 as control
from pilotfish.v1 import generation_pb2 as pb

SIZE = (4 << 20) - 2048  # bytes of a body or message: the default of max_message_bytes minus room for headers
AT_ONCE = 10
_GENERATE = "/pilotfish.v1.InferenceService/Generate"
_CONTROL = "/pilotfish.v1.ControlService/"
_LIMIT = 5 << 20  # bytes, for messages that this client sends


@dataclass(frozen=True, slots=True)
class HostileCall:
    """An HTTP route or gRPC method, and a function that makes its body."""

    path: str
    make: Callable[[], bytes]

    @property
    def is_http(self) -> bool:
        return not self.path.startswith("/pilotfish")


def _many(element: str, size: int = SIZE - 200) -> str:
    """Repeat an element until the list has this size."""
    return ",".join([element] * (size // (len(element) + 1)))


def _body(path: str, head: str, inside: Callable[[], str], tail: str) -> HostileCall:
    return HostileCall(path, lambda: (head + inside() + tail).encode("utf-8", "surrogatepass"))


def _chat(inside: Callable[[], str], head: str = "", tail: str = "") -> HostileCall:
    return _body("/v1/chat/completions", '{"messages":[' + head, inside, tail + "]}")


def _field(name: str, inside: Callable[[], str], opening: str = "[", closing: str = "]") -> HostileCall:
    """A completion with one huge field."""
    return _body("/v1/completions", f'{{"prompt":"x","{name}":{opening}', inside, closing + "}")


def _numbered(template: str, count: int) -> str:
    return ",".join(template.format(i) for i in range(count))


HTTP: dict[str, HostileCall] = {
    "empty messages": _chat(lambda: _many("{}")),
    "messages that are null": _chat(lambda: _many("null")),
    "small messages": _chat(lambda: _many('{"role":"user","content":"a"}')),
    "one long message": _chat(lambda: "a b " * (SIZE // 4 - 40), '{"role":"user","content":"', '"}'),
    "one long role": _chat(lambda: "a" * (SIZE - 100), '{"content":"a","role":"', '"}'),
    "many parts": _chat(lambda: _many('{"type":"text","text":"a"}'), '{"role":"user","content":[', "]}"),
    "parts that are none": _chat(lambda: _many("7"), '{"role":"user","content":[', "]}"),
    "messages with unknown keys": _chat(lambda: _many('{"a":1}')),
    "stops that are numbers": _field("stop", lambda: _many("1")),
    "stops": _field("stop", lambda: _many('"a"')),
    "one long stop": _field("stop", lambda: "a" * (SIZE - 100), '"', '"'),
    "unknown keys": _body("/generate", '{"prompt":"x",', lambda: _numbered('"k{}":1', 300_000), "}"),
    "one key many times": _body("/generate", '{"prompt":"x",', lambda: _many('"k":1'), "}"),
    "one long key": _body("/generate", '{"prompt":"x","', lambda: "k" * (SIZE - 100), '":1}'),
    "biases": _field("logit_bias", lambda: _numbered('"{}":1', 350_000), "{", "}"),
    "biases of no token": _field("logit_bias", lambda: _numbered('"a{}":1', 350_000), "{", "}"),
    "a long prompt": _field("suffix", lambda: "", '"", "prompt":"' + "a b " * (SIZE // 4 - 40), '"'),
    "a prompt of spaces": _field("suffix", lambda: "", '"", "prompt":"' + " " * (SIZE - 200), '"'),
    "a prompt of escapes": _field("suffix", lambda: "", '"", "prompt":"' + "\\u00e9" * (SIZE // 6 - 40), '"'),
    "half surrogates": _field("suffix", lambda: "", '"", "prompt":"' + "\\ud800" * (SIZE // 6 - 40), '"'),
    "token ids": _body("/v1/completions", '{"prompt":[', lambda: _many("1"), "]}"),
    "token ids that are none": _body("/v1/completions", '{"prompt":[', lambda: _many('"a"'), "]}"),
    "prompts": _body("/v1/completions", '{"prompt":[', lambda: _many("[1]"), "]}"),
    "allowed ids": _field("allowed_token_ids", lambda: _many("1")),
    "banned ids": _field("banned_token_ids", lambda: _many("-1")),
    "stop ids": _field("stop_token_ids", lambda: _many("1.5")),
    "choices": _field("guided_choice", lambda: _many('"a"')),
    "a schema of properties": _field(
        "guided_json", lambda: _numbered('"p{}":{{"type":"string"}}', 100_000), '{"properties":{', "}}"
    ),
    "a schema as text": _field("guided_json", lambda: "a" * (SIZE - 100), '"', '"'),
    "a long regex": _field("guided_regex", lambda: "(a|b)" * (SIZE // 5 - 40), '"', '"'),
    "a long grammar": _field("guided_grammar", lambda: "start: a " * (SIZE // 9 - 40), '"', '"'),
    "deep lists": _body("/generate", '{"prompt":', lambda: "[" * (SIZE - 100), ""),
    "deep objects": _body("/generate", '{"prompt":', lambda: '{"a":' * (SIZE // 5 - 40), ""),
    "a long number": _body("/generate", '{"prompt":"x","seed":', lambda: "9" * (SIZE - 100), "}"),
    "a long fraction": _body("/generate", '{"prompt":"x","temperature":0.', lambda: "9" * (SIZE - 100), "}"),
    "no UTF-8": HostileCall("/generate", lambda: b'{"prompt":"' + b"\xff" * (SIZE - 100) + b'"}'),
    "zeros": HostileCall("/generate", lambda: bytes(SIZE)),
}


def _request(**fields: object) -> bytes:
    return pb.GenerateRequest(**({"prompt": "x"} | fields)).SerializeToString()  # type: ignore[arg-type]


def _generate(make: Callable[[], bytes]) -> HostileCall:
    return HostileCall(_GENERATE, make)


def _asks(method: str, make: Callable[[], bytes]) -> HostileCall:
    return HostileCall(_CONTROL + method, make)


def _nested(number: int, inside: bytes) -> bytes:
    """Encode a message of bytes as the field `number` of a message."""
    size, head = len(inside), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + inside


TEXT = "a b " * (SIZE // 4 - 40)
GRPC: dict[str, HostileCall] = {
    "prompt": _generate(lambda: _request(prompt=TEXT)),
    "prompt of lines": _generate(lambda: _request(prompt="\n" * SIZE)),
    "prompt of signs": _generate(lambda: _request(prompt="€" * (SIZE // 3))),
    "ids": _generate(lambda: _request(prompt=None, token_ids=pb.TokenIds(ids=[1] * SIZE))),
    "large ids": _generate(lambda: _request(prompt=None, token_ids=pb.TokenIds(ids=[2**32 - 1] * (SIZE // 5)))),
    "turns": _generate(lambda: _nested(5, b"\x0a\0" * (SIZE // 2))),
    "a turn": _generate(lambda: _request(prompt=None, messages={"messages": [{"role": "user", "content": TEXT}]})),
    "stop strings": _generate(lambda: _nested(3, b"x") + _nested(7, b"\x1a\0" * (SIZE // 2))),
    "a stop string": _generate(lambda: _request(stopping=pb.StoppingParams(stop=[TEXT]))),
    "stop tokens": _generate(lambda: _request(stopping=pb.StoppingParams(stop_token_ids=[1] * SIZE))),
    "bias": _generate(lambda: _request(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(240000), 1.0)))),
    "allowed": _generate(lambda: _request(sampling={"allowed_token_ids": pb.TokenIds(ids=[1] * SIZE)})),
    "banned": _generate(lambda: _request(sampling=pb.SamplingParams(banned_token_ids=[1] * SIZE))),
    "alternatives": _generate(lambda: _nested(3, b"x") + _nested(10, _nested(4, b"\x0a\0" * (SIZE // 2)))),
    "an alternative": _generate(lambda: _request(guided={"choice": pb.Choice(choices=[TEXT])})),
    "regex": _generate(lambda: _request(guided=pb.GuidedDecoding(regex=TEXT))),
    "schema": _generate(lambda: _request(guided=pb.GuidedDecoding(json_schema=json.dumps({"enum": [TEXT]})))),
    "grammar": _generate(lambda: _request(guided=pb.GuidedDecoding(grammar=TEXT))),
    "unknown field": _generate(lambda: _nested(3, b"x") + _nested(15, bytes(SIZE))),
    "unknown fields": _generate(lambda: _nested(3, b"x") + b"\x7a\0" * (SIZE // 2)),
    "no message": _generate(lambda: b"\xff" * SIZE),
    "no text": _generate(lambda: _nested(3, b"\xff" * SIZE)),
    "request id": _generate(lambda: _request(request_id=TEXT)),
    "model": _generate(lambda: _request(model=TEXT)),
    "salt": _generate(lambda: _request(cache_salt=TEXT)),
    "proposer": _generate(lambda: _request(speculation=pb.SpeculationOptions(proposer=TEXT))),
    "received outputs": _generate(lambda: _nested(3, b"x") + _nested(13, b"\x12\0" * (SIZE // 2))),
    "tokenize": _asks("Tokenize", lambda: control.TokenizeRequest(text=TEXT).SerializeToString()),
    "detokenize": _asks("Detokenize", lambda: control.DetokenizeRequest(token_ids=[1] * SIZE).SerializeToString()),
    "abort": _asks("Abort", lambda: control.AbortRequest(request_id=TEXT).SerializeToString()),
}
CALLS: Mapping[str, HostileCall] = {f"HTTP, {name}": call for name, call in HTTP.items()} | {
    f"gRPC, {name}": call for name, call in GRPC.items()
}


async def _send(call: HostileCall, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> list[str]:
    body = call.make()
    assert len(body) <= _LIMIT, len(body)

    async def once() -> str:
        if call.is_http:
            answer = await http.post(call.path, content=body, headers={"Content-Type": "application/json"})
            return str(answer.status_code)
        try:
            await channel.unary_unary(call.path)(body, timeout=120)  # type: ignore[arg-type]  # bytes need no serializer
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    return await asyncio.gather(*(once() for _ in range(AT_ONCE)))


async def main(address: str, http_address: str) -> None:
    """Send the calls whose names are read from standard input."""
    options = [("grpc.max_send_message_length", _LIMIT), ("grpc.max_receive_message_length", 64 << 20)]
    async with (
        httpx.AsyncClient(base_url=f"http://{http_address}", timeout=120) as http,
        grpc.aio.insecure_channel(address, options) as channel,
    ):
        print("ready", flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(json.dumps(collections.Counter(await _send(CALLS[name], http, channel))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
