"""Calls of Anthropic's own library, run by the Python that has it; prints what they returned as JSON."""

import json
import sys

from anthropic import Anthropic

given = json.loads(sys.argv[1])
client = Anthropic(base_url=given["url"], api_key="none", max_retries=0)
fields = {"model": given["model"], "messages": [{"role": "user", "content": given["prompt"]}]}
greedy = fields | {"max_tokens": 24, "extra_body": {"temperature": 0.0}}  # the library has no such argument any more


def tokens(usage) -> list:
    """How many tokens were read and written; the API counts those apart that were in the cache."""
    return [usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens]


whole = client.messages.create(**greedy)
with client.messages.stream(**greedy) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "streamed": streamed,
            "stop_reason": whole.stop_reason,
            "usage": tokens(whole.usage),
            "streamed_usage": tokens(final.usage),
            "counted": client.messages.count_tokens(**fields).input_tokens,
        }
    )
)
