"""A tool call and the answer to its result, through each of the libraries; prints both as JSON."""

import json
import sys
from functools import partial

from openai import OpenAI

given = json.loads(sys.argv[1])
name, url, asked, result = given["model"], given["url"], "Run it.", given["result"]
schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
function = {"name": "run", "description": "Run a command.", "parameters": schema}
openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
tools = [{"type": "function", "function": function}]


def told(turns: list, call) -> list:
    """The conversation with the call and its result."""
    record = {"name": call.function.name, "arguments": call.function.arguments}
    asked_for = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": record}]}
    return [*turns, asked_for, {"role": "tool", "tool_call_id": call.id, "content": result}]


def by_chat(create) -> list:
    turns = [{"role": "user", "content": asked}]
    choice = create(messages=turns).choices[0]
    [call] = choice.message.tool_calls
    answer = create(messages=told(turns, call)).choices[0].message.content
    return [call.function.name, json.loads(call.function.arguments), choice.finish_reason, answer]


def by_openai(**fields):
    return openai.chat.completions.create(model=name, tools=tools, **fields)


def by_openai_streamed(**fields):
    with openai.chat.completions.stream(model=name, tools=tools, **fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def by_litellm(**fields):
    import litellm

    return litellm.completion(model=f"openai/{name}", api_base=f"{url}/v1", api_key="none", tools=tools, **fields)


def by_responses(*, streamed: bool) -> list:
    fields = {"model": name, "store": False, "tools": [{"type": "function", **function}]}
    turns = [{"role": "user", "content": asked}]
    if streamed:
        with openai.responses.stream(input=turns, **fields) as stream:
            for _ in stream:
                pass
            first = stream.get_final_response()
    else:
        first = openai.responses.create(input=turns, **fields)
    [call] = [item for item in first.output if item.type == "function_call"]
    record = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    answer = openai.responses.create(input=[*turns, record, output], **fields)
    return [call.name, json.loads(call.arguments), first.status, answer.output_text]


def by_anthropic(*, streamed: bool) -> list:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    offered = [{"name": "run", "description": "Run a command.", "input_schema": schema}]
    fields = {"model": name, "max_tokens": 200, "tools": offered}
    turns = [{"role": "user", "content": asked}]
    if streamed:
        with client.messages.stream(messages=turns, **fields) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(messages=turns, **fields)
    [call] = [block for block in first.content if block.type == "tool_use"]
    turns += [
        {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]},
    ]
    answer = client.messages.create(messages=turns, **fields)
    return [call.name, call.input, first.stop_reason, answer.content[0].text]


def by_langchain() -> list:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def run(command: str) -> str:
        """Run a command."""
        return result

    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0).bind_tools([run])
    turns = [HumanMessage(asked)]
    first = model.invoke(turns)
    [call] = first.tool_calls
    answer = model.invoke([*turns, first, ToolMessage(run.invoke(call["args"]), tool_call_id=call["id"])])
    return [call["name"], call["args"], first.response_metadata["finish_reason"], answer.content]


PARTS = {
    "openai": partial(by_chat, by_openai),
    "openai streamed": partial(by_chat, by_openai_streamed),
    "responses": partial(by_responses, streamed=False),
    "responses streamed": partial(by_responses, streamed=True),
    "anthropic": partial(by_anthropic, streamed=False),
    "anthropic streamed": partial(by_anthropic, streamed=True),
    "litellm": partial(by_chat, by_litellm),
    "langchain": by_langchain,
}
print(json.dumps({name: part() for name, part in PARTS.items()}))
