"""Calls of OpenAI's own library, run by the Python that has it; prints what each part returned as JSON."""

import json
import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

given = json.loads(sys.argv[1])
client = OpenAI(base_url=f"{given['url']}/v1", api_key="none", max_retries=0)
greedy = {"model": given["model"], "temperature": 0.0, "max_tokens": 24}
respond = {"model": given["model"], "temperature": 0.0, "max_output_tokens": 24, "store": False}
messages = [{"role": "user", "content": given["prompts"][0]}]


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    certain: bool


def models() -> dict:
    one = client.models.retrieve(given["model"])
    return {"listed": [model.id for model in client.models.list()], "retrieved": one.id}


def completions() -> dict:
    whole = client.completions.create(prompt=given["prompts"][0], **greedy)
    usage = {"include_usage": True}
    chunks = list(client.completions.create(prompt=given["prompts"][0], stream=True, stream_options=usage, **greedy))
    many = client.completions.create(prompt=given["prompts"], **greedy)
    echoed = client.completions.create(prompt=given["prompts"][0], echo=True, logprobs=1, **greedy | {"max_tokens": 1})
    return {
        "whole": whole.choices[0].text,
        "streamed": "".join(choice.text for chunk in chunks for choice in chunk.choices),
        "usage": whole.usage.model_dump(),
        "streamed_usage": chunks[-1].usage.model_dump(),
        "many": [choice.text for choice in sorted(many.choices, key=lambda choice: choice.index)],
        "echoed": echoed.choices[0].text,
        "echoed_logprobs": echoed.choices[0].logprobs.token_logprobs,
    }


def chat() -> dict:
    whole = client.chat.completions.create(messages=messages, **greedy)
    stream = client.chat.completions.create(messages=messages, stream=True, **greedy)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    }


def responses() -> dict:
    whole = client.responses.create(input=given["prompts"][0], **respond)
    with client.responses.stream(input=given["prompts"][0], **respond) as stream:
        events = list(stream)
    return {
        "whole": whole.output_text,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
    }


def chat_parsed() -> dict:
    fields = greedy | {"max_tokens": given["most"]}
    parsed = client.chat.completions.parse(messages=messages, response_format=Verdict, **fields)
    return parsed.choices[0].message.parsed.model_dump()


def responses_parsed() -> dict:
    fields = respond | {"max_output_tokens": given["most"]}
    return client.responses.parse(input=given["prompts"][0], text_format=Verdict, **fields).output_parsed.model_dump()


PARTS = (models, completions, chat, responses, chat_parsed, responses_parsed)
print(json.dumps({part.__name__: part() for part in PARTS}))
