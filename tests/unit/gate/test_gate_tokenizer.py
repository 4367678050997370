"""The tokenizer folder and the prompts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.errors import SourceError
from pipeline.gate.prompts import render_chat, shipped_prompts
from pipeline.gate.protocol import Protocol
from pipeline.gate.tokenizer import GateTokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_gate_tokenizer_reads_ids_template_and_special_tokens(folder):
    tokenizer = GateTokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("Où est Paris ?")) == "Où est Paris ?"
    assert (tokenizer.bos_id, tokenizer.end_ids) == (256, (257,))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_gate_tokenizer_prefers_the_generation_config_for_end_ids(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 257]}')
    assert GateTokenizer.load(folder).end_ids == (5, 257)


def test_prompts_go_through_the_template_when_there_is_one(folder):
    chat = GateTokenizer.load(folder).prompts()
    assert chat[0].kind == "chat"
    assert chat[0].token_ids[0] == 256 and chat[0].token_ids[-2] == 257  # <s> … </s> >
    plain = replace(GateTokenizer.load(folder), chat_template=None).prompts()
    assert {prompt.kind for prompt in plain} == {"text"}
    assert len({prompt.name for prompt in plain}) == len(plain) == 8


def test_text_ids_refuses_a_text_that_is_too_short(folder):
    with pytest.raises(SourceError, match=r"5 tokens.*needs 100"):
        GateTokenizer.load(folder).text_ids("hello", Protocol("t", "x", "0" * 64, tokens=100))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_load_refuses_a_folder_without_a_tokenizer(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        GateTokenizer.load(tmp_path)


def test_gate_tokenizer_refuses_a_template_without_a_name(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": [{"x": 1}]}))
    with pytest.raises(SourceError, match=r"tokenizer_config\.json: chat_template has \{'x': 1\}"):
        GateTokenizer.load(folder)


@pytest.mark.parametrize("template", ["{{ oops(", "{{ messages.__class__.__mro__[1].__subclasses__() }}"])
def test_render_chat_refuses_broken_and_hostile_templates(template):
    with pytest.raises(SourceError, match="chat template"):
        render_chat(template, "hi", {})


def test_shipped_prompts_are_all_encoded():
    assert all(prompt.token_ids for prompt in shipped_prompts(lambda text: [len(text)]))


@pytest.mark.parametrize(
    "template",
    [
        # What templates of published models use beyond plain jinja.
        "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}{{ messages[0].content }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ messages[0] | tojson(indent=2) }}",
        "{% if tools is not none %}tools{% endif %}{{ messages[0].content }}",
        "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}",
    ],
)
def test_render_chat_knows_what_templates_expect(template):
    assert "Hi" in render_chat(template, "Hi", {})


def test_render_chat_is_the_same_on_every_day():
    assert render_chat("{{ strftime_now('%d %b %Y') }}", "Hi", {}) == "26 Jul 2024"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% include '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for x in %}",
    ],
)
def test_render_chat_refuses_templates_that_fail_or_reach_out(template):
    with pytest.raises(SourceError, match="does not render"):
        render_chat(template, "Hi", {})


def test_prompts_refuse_a_template_that_renders_nothing(folder):
    with pytest.raises(SourceError, match="empty prompt"):
        replace(GateTokenizer.load(folder), chat_template="").prompts()


@pytest.mark.parametrize(("name", "content"), [("tokenizer_config.json", "[]"), ("generation_config.json", "[" * 5000)])
def test_gate_tokenizer_names_a_file_that_is_no_object(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(SourceError, match=name):
        GateTokenizer.load(folder)


def test_gate_tokenizer_takes_the_template_that_transformers_takes(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert GateTokenizer.load(folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "x", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    assert GateTokenizer.load(folder).chat_template == "d"
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(SourceError, match="chat_template is 5"):
        GateTokenizer.load(folder)
