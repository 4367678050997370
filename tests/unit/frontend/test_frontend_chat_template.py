"""Rendered prompts are transformers' byte for byte. Expected values: make_text_reference.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SourceError
from pipeline.frontend.chat_template import ChatTemplates, TemplateFailed, find_templates

DATA = Path(__file__).parents[2] / "data" / "frontend"
REFERENCE: dict[str, Any] = json.loads((DATA / "templates.json").read_text("utf-8"))
CASES: list[dict[str, Any]] = REFERENCE["cases"]


def render(template: str, case: dict[str, Any]) -> str:
    templates = ChatTemplates({"default": template}, REFERENCE["special_tokens"])
    return templates.render(
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case.get("add_generation_prompt", True),
        continue_final_message=case.get("continue_final_message", False),
        variables=case.get("variables"),
    )


@pytest.mark.parametrize("case", CASES, ids=[f"{case['template']}-{case['case']}" for case in CASES])
def test_render_equals_transformers(case: dict[str, Any]) -> None:
    source = REFERENCE["sources"][case["template"]]
    if "error" in case["expected"]:
        with pytest.raises(TemplateFailed):
            render(source, case)
    else:
        assert render(source, case) == case["expected"]["text"]


def test_template_reason_reaches_the_client() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", {"messages": [{"role": "user", "content": ""}]})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_reaches_out_is_refused(template: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        render(template, {"messages": [{"role": "user", "content": "a"}]})
    assert "Traceback" not in str(caught.value)


def test_message_text_is_never_a_template() -> None:
    text = render("{{ messages[0].content }}", {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% x"}]})
    assert text == "{{ 7 * 7 }}{% x"


def test_strftime_now_follows_the_format() -> None:
    text = render("{{ strftime_now('%Y-%m-%d') }}", {"messages": [{"role": "user", "content": "a"}]})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)


def test_separate_files_win_over_the_configuration(tmp_path: Path) -> None:
    assert find_templates(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert find_templates(tmp_path) == {"default": "legacy"}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    assert find_templates(tmp_path) == {"default": "config"}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_templates(tmp_path) == {"default": "plain", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_templates(tmp_path) == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    assert find_templates(tmp_path) == {"default": "file", "tool_use": "file tools"}


@pytest.mark.parametrize(
    "content",
    [
        '{"chat_template": [{"x": 1}]}',
        '{"chat_template": [{"name": "default", "template": null}]}',
        '{"chat_template": ["text"]}',
        '{"chat_template": {"name": "default"}}',
        "[" * 100_000,
    ],
    ids=["keys", "null", "text", "object", "nested"],
)
def test_malformed_template_list_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(SourceError, match=r"tokenizer_config\.json"):
        find_templates(tmp_path)


def test_tool_use_template_is_taken_with_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    message = [{"role": "user", "content": "a"}]
    assert templates.render(message) == "plain"
    assert templates.render(message, tools=[{"type": "function"}]) == "tools"


def test_missing_template_names_the_way_out() -> None:
    with pytest.raises(TemplateFailed, match="/v1/completions"):
        ChatTemplates({}, {}).render([{"role": "user", "content": "a"}])
    with pytest.raises(TemplateFailed, match="no default"):
        ChatTemplates({"rag": "x"}, {}).render([{"role": "user", "content": "a"}])


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(SourceError, match="line 2"):
        ChatTemplates({"default": "a\n{% for %}"}, {})
