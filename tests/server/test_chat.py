"""Chat templates: what the checkpoint's own says, token for token what transformers makes of it, and within bounds."""

from __future__ import annotations

import json

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from pilotfish.engine.errors import InvalidRequest, ModelError
from pilotfish.engine.text.codec import Codec
from pilotfish.server.chat import MAX_MESSAGES, ChatTemplate
from pilotfish.v1 import generation_pb2 as pb
from tests.engine.text.test_codec import byte_level
from tests.server.test_generate import refused, request
from tests.serving import serving

# Written after the forms that these families use; each line of them is one that some checkpoint really has.
GEMMA = """{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
MACROS = """{%- macro turn(role, content) -%}
[{{ role | upper }}] {{ content }}{{ eos_token }}
{% endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{% for message in messages %}
    {% if message.content == '' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
{{ turn(message.role, message.content) }}
    {% if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{{ {'role': 'é<', 'n': ns.count} | tojson }}
{% generation %}{{ date_string * 3 }}{{ system_message }}{% endgeneration %}

"""
TEMPLATES = {"gemma": GEMMA, "macros": MACROS}
CONVERSATIONS = [
    [("user", "hi")],
    [("system", " be brief \n"), ("user", "a <b> é")],
    [("user", "one"), ("assistant", "two"), ("user", "")],
    [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
    [("user", "<s>not a start"), ("user", "again")],
]
EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def checkpoint(folder, template, *, where="config"):
    """A tokenizer folder that puts <s> before every prompt, as Llama's and Gemma's do."""
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
    config["pad_token"] = None
    if where == "config":
        config["chat_template"] = template
    elif where == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    elif where == "file":
        config["chat_template"] = "not this one"
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


def rendered(template, *turns):
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages(turns or [("user", "hi")]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(tmp_path, name):
    source = checkpoint(tmp_path, TEMPLATES[name])
    reference, template = PreTrainedTokenizerFast.from_pretrained(source), ChatTemplate.load(source)
    refused = 0
    for turns in CONVERSATIONS:
        conversation = [{"role": role, "content": content} for role, content in turns]
        try:
            want = reference.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001  # the template's own refusal
            with pytest.raises(InvalidRequest, match=str(error)):
                template.render(messages(turns))
            refused += 1
            continue
        text = template.render(messages(turns))
        assert text == want
        ids = reference.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert list(Codec.load(source).encode(text, bare=True)) == ids
    assert refused == (2 if name == "gemma" else 0)


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_where_a_template_is_found(tmp_path, where):
    template = ChatTemplate.load(
        checkpoint(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", where=where)
    )
    assert template.render(messages([("user", "hi")])) == "<s>hi</s>"


def test_a_checkpoint_may_have_no_template_but_no_broken_one(tmp_path):
    assert ChatTemplate.load(checkpoint(tmp_path, "", where="nowhere")) is None
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** 99999 }}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ environment.turn() }}",
        "{{ messages[5].content }}",
    ],
)
def test_a_hostile_or_faulty_template_is_refused(hostile, monkeypatch):
    """Also one that would run for ever: with a bound that is reached sooner than the usual one."""
    monkeypatch.setattr("pilotfish.server.chat.MAX_TURNS", 20_000)
    with pytest.raises(InvalidRequest) as error:
        rendered(hostile)
    assert [violation.field for violation in error.value.violations] == ["messages"]


def test_a_template_with_many_turns_within_the_bounds_is_fine():
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    assert template.render(messages([("user", "x")] * MAX_MESSAGES)) == "x" * MAX_MESSAGES
    with pytest.raises(InvalidRequest, match="4097 messages"):
        template.render(messages([("user", "x")] * (MAX_MESSAGES + 1)))
    with pytest.raises(InvalidRequest, match="0 messages"):
        template.render([])


def conversation(*turns):
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


async def test_the_server_renders_and_adds_no_second_start_token(tmp_path):
    source = checkpoint(tmp_path, GEMMA)
    codec = Codec.load(source)
    async with serving(codec=codec, chat=ChatTemplate.load(source)) as server:
        server.engine.vocab_size = codec.tokenizer.get_vocab_size()
        await server.inference.Generate(request(messages=conversation(("user", "hi"))))
        [asked] = server.engine.requests
        bos = codec.tokenizer.token_to_id("<s>")
        assert asked.token_ids[0] == bos
        assert asked.token_ids.count(bos) == 1
        text = codec.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
        assert text == "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
        error = await refused(server, messages=conversation(("assistant", "hi")), sampling=pb.SamplingParams(n=65))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "roles must alternate" in error.details()
        assert "sampling.n is 65" in error.details()
