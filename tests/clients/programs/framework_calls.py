"""Calls of LiteLLM and LangChain, run by the Python that has them; prints what each returned as JSON."""

import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

given = json.loads(sys.argv[1])
prompts, base = given["prompts"], f"{given['url']}/v1"
messages = [{"role": "user", "content": prompts[0]}]
lite = {"model": f"openai/{given['model']}", "api_base": base, "api_key": "none", "temperature": 0.0, "max_tokens": 24}
chain = {"model": given["model"], "base_url": base, "api_key": "none", "temperature": 0.0, "max_retries": 0}


class Verdict(BaseModel):
    """Whether it is so."""

    model_config = ConfigDict(extra="forbid")  # else a small model may go on with properties of its own
    answer: Literal["yes", "no"]
    certain: bool


def by_litellm() -> dict:
    import litellm

    whole = litellm.completion(messages=messages, **lite)
    text = lite | {"model": f"text-completion-openai/{given['model']}"}
    return {
        "chat": whole.choices[0].message.content,
        "chat_streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=messages, stream=True, **lite)
        ),
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "many": [choice.text for choice in litellm.text_completion(prompt=prompts, **text).choices],
    }


def by_langchain() -> dict:
    from langchain_openai import ChatOpenAI, OpenAI

    model = ChatOpenAI(max_tokens=24, **chain)
    longer = ChatOpenAI(max_tokens=given["most"], **chain)
    by_schema = longer.with_structured_output(Verdict, method="json_schema")
    by_call = longer.with_structured_output(Verdict, method="function_calling")
    whole = model.invoke(prompts[0])
    return {
        "chat": whole.content,
        "chat_streamed": "".join(chunk.content for chunk in model.stream(prompts[0])),
        "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "many": [texts[0].text for texts in OpenAI(max_tokens=24, **chain).generate(prompts).generations],
        "structured": [model.invoke(prompts[0]).model_dump() for model in (by_schema, by_call)],
    }


print(json.dumps({"litellm": by_litellm(), "langchain": by_langchain()}))
