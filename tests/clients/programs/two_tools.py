"""A model with two tools, through SDKs and agents; prints what each part got as JSON.

The agents run Python functions, which raise an error for arguments that are not theirs.
"""

import asyncio
import json
import sys

from anthropic import Anthropic
from openai import OpenAI

given = json.loads(sys.argv[1])
url, name, asked = given["url"], given["model"], given["prompt"]
turns = [{"role": "user", "content": asked}]
FUNCTIONS = {
    "add": ("Add two integers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    "weather": ("Return the weather of a city.", {"city": {"type": "string"}}),
}
NAMED = {"type": "function", "function": {"name": "add"}}
CHOICES = {
    "auto": {"tool_choice": "auto"},
    "required": {"tool_choice": "required", "parallel_tool_calls": False},
    "parallel": {"tool_choice": "required"},
    "named": {"tool_choice": NAMED, "parallel_tool_calls": False},
    "none": {"tool_choice": "none"},
}
LIMIT = 60  # tokens; a small model may repeat parallel calls until then


def schema(properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties]}


functions = [{"name": f, "description": d, "parameters": schema(p)} for f, (d, p) in FUNCTIONS.items()]
openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
greedy = {"model": name, "temperature": 0.0, "max_tokens": LIMIT}


def by_openai() -> dict:
    fields = greedy | {"messages": turns, "tools": [{"type": "function", "function": f} for f in functions]}
    found = {}
    for choice, more in CHOICES.items():
        whole = openai.chat.completions.create(**fields, **more)
        with openai.chat.completions.stream(**fields, **more) as stream:
            for _ in stream:
                pass
            streamed = stream.current_completion_snapshot  # `get_final_completion` raises for a cut answer
        for how, answer in (("whole", whole), ("streamed", streamed)):
            message = answer.choices[0].message
            found[f"{choice} {how}"] = {
                "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or ()],
                "content": message.content,
                "finish": answer.choices[0].finish_reason,
            }
        found[f"{choice} whole"]["prompt_tokens"] = whole.usage.prompt_tokens
    return found


def by_responses() -> dict:
    tools = [{"type": "function", **f} for f in functions]
    fields = {"model": name, "temperature": 0.0, "max_output_tokens": LIMIT, "store": False, "input": turns}
    found = {}
    for choice, more in CHOICES.items():
        choice_fields = more | {"tool_choice": {"type": "function", "name": "add"}} if choice == "named" else more
        answer = openai.responses.create(**fields, tools=tools, **choice_fields)
        found[choice] = {
            "calls": [[item.name, item.arguments] for item in answer.output if item.type == "function_call"],
            "content": answer.output_text,
            "finish": answer.status,
        }
    return found


def by_anthropic() -> dict:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    fields = {"model": name, "max_tokens": LIMIT, "messages": turns, "extra_body": {"temperature": 0.0}}
    once = {"disable_parallel_tool_use": True}
    found = {}
    for choice, how in {
        "auto": {"type": "auto"},
        "required": {"type": "any", **once},
        "parallel": {"type": "any"},
        "named": {"type": "tool", "name": "add", **once},
        "none": {"type": "none"},
    }.items():
        with client.messages.stream(**fields, tools=tools, tool_choice=how) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**fields, tools=tools, tool_choice=how)
        for way, answer in (("whole", whole), ("streamed", streamed)):
            found[f"{choice} {way}"] = {
                "calls": [[b.name, json.dumps(b.input)] for b in answer.content if b.type == "tool_use"],
                "content": "".join(b.text for b in answer.content if b.type == "text"),
                "finish": answer.stop_reason,
            }
    return found


ran: list[list] = []  # what the agents have called


def add(a: int, b: int) -> int:
    """Add two integers."""
    ran.append(["add", json.dumps({"a": a, "b": b})])
    return a + b


def weather(city: str) -> str:
    """Return the weather of a city."""
    ran.append(["weather", json.dumps({"city": city})])
    return f"It is sunny in {city}."


def taken() -> list:
    calls = [*ran]
    ran.clear()
    return calls


def by_langchain() -> dict:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_openai import ChatOpenAI

    @wrap_model_call
    def call_first(request, handler):
        is_first = len(request.messages) == 1
        return handler(request.override(tool_choice="required") if is_first else request)

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **greedy)
    found = {}
    for choice, middleware in {"auto": [], "required": [call_first]}.items():
        agent = create_agent(model, [add, weather], middleware=middleware)
        messages = agent.invoke({"messages": turns}, {"recursion_limit": 20})["messages"]
        found[choice] = {"calls": taken(), "roles": [message.type for message in messages]}
    return found


def by_pydantic_ai() -> dict:
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    class CallFirst(AbstractCapability):
        def get_model_settings(self):
            return lambda run: {"tool_choice": "required" if run.run_step == 1 else "auto"}

    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"temperature": 0.0, "max_tokens": LIMIT, "parallel_tool_calls": False}
    found = {}
    for choice, capabilities in {"auto": [], "required": [CallFirst()]}.items():
        agent = Agent(model, tools=[add, weather], model_settings=settings, capabilities=capabilities)
        done = asyncio.run(agent.run(asked, usage_limits=UsageLimits(request_limit=10)))
        found[choice] = {"calls": taken(), "roles": [message.kind for message in done.all_messages()]}
    return found


PARTS = {"openai": by_openai, "responses": by_responses, "anthropic": by_anthropic}
AGENTS = {"langchain": by_langchain, "pydantic-ai": by_pydantic_ai}
print(json.dumps({library: part() for library, part in (PARTS | AGENTS).items()}))
