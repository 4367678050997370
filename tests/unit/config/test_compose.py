from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config.compose import compose, compose_config, conf_root, options, search_path
from pipeline.config.fields import groups, leaves
from pipeline.config.overrides import expand_sweep, parse
from pipeline.errors import ConfigError, Finding

OPTIONS = options([conf_root()])
# Names that scripts outside the project use.
CONTRACT = {
    "model": "smollm2 llama2 llama2_13b llama2_70b llama3_8b llama3_70b llama3_405b mistral_7b mixtral_8x7b hf",
    "precision": "fp16 bf16 int8 int4 smoothquant fp8 fp8_rowwise int4_awq w4a8_awq nvfp4 from_checkpoint",
    "parallel": "single tp2 tp4 tp8 tp4_pp2",
    "hardware": "auto cpu a100_80g h100_80g h200 l40s l4 b200",
    "target": "auto engine llmapi reference",
    "toolchain": "trtllm_0_20_0 trtllm_0_21_0 trtllm_1_0_0 trtllm_1_1_0 trtllm_1_2_1",
    "gate": "quick standard",
    "policy": "dev prod",
    "source": "auto wheel hub local",
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems(*arguments: str) -> list[Finding]:
    with pytest.raises(ConfigError) as caught:
        compose_config(arguments)
    assert caught.value.exit_code == 2
    return list(caught.value.findings)


@pytest.mark.parametrize("group", CONTRACT)
def test_options_of_the_contract_exist(group: str) -> None:
    assert set(CONTRACT[group].split()) <= set(OPTIONS[group])


@pytest.mark.parametrize("index", range(max(map(len, OPTIONS.values()))))
def test_every_shipped_option_composes(index: int) -> None:
    """One option of each group at a time, so that all are seen in as few compositions as possible."""
    chosen = {group: names[index % len(names)] for group, names in OPTIONS.items()}
    composed = compose_config([f"{group}={option}" for group, option in chosen.items()])
    assert composed.choices == chosen


@pytest.mark.parametrize(
    "file", sorted(conf_root().rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_every_shipped_file_says_what_it_is_and_when_to_use_it(file: Path) -> None:
    first, second = file.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("# ") and second.startswith("# ")
    assert "_target_" not in file.read_text(encoding="utf-8")


def test_every_group_has_options_and_no_folder_is_without_group() -> None:
    assert set(OPTIONS) == set(groups())


@pytest.mark.parametrize(
    ("argument", "rule", "hint"),
    [
        ("modle=llama2", "config-unknown-key", "did you mean model?"),
        ("model=llma2", "config-unknown-option", "did you mean model=llama2?"),
        ("limits.max_batchsize=2", "config-unknown-key", "did you mean limits.max_batch_size?"),
        ("tp=2", "config-unknown-key", "did you mean parallel.tp?"),
        ("gate.top1_agrement_min=0.9", "config-unknown-key", "did you mean gate.top1_agreement_min?"),
        ("banana.metod=awq", "config-unknown-key", "groups are model, precision"),
        ("parallel.tp=two", "config-bad-value", ""),
        ("parallel.tp=2.5", "config-bad-value", ""),
        ("parallel.tp=0", "config-bad-value", ""),
        ("parallel.tp=null", "config-bad-value", ""),
        ("policy.allow_reference=maybe", "config-bad-value", ""),
        ("target.kind=engin", "config-bad-value", ""),
        ("frontend.port=70000", "config-bad-value", ""),
        ("limits=8", "config-unknown-option", ""),
        ("model.architecture=3", "config-bad-value", ""),
        ("~gate", "config-syntax", ""),
        ("gate", "config-syntax", "gate=NAME"),
        ("model._target_=os.system", "config-names-code", ""),
        ("frontend.triton=[a b,c", "config-syntax", """'frontend.triton=["a b","c"]'"""),
    ],
)
def test_mistake_is_refused_with_the_nearest_match(argument: str, rule: str, hint: str) -> None:
    (found,) = problems(argument)
    assert found.rule == rule
    assert hint in found.hint


def test_all_mistakes_show_at_once() -> None:
    found = problems("modle=x", "parallel.tp=two", "precision=fp9", "gate.tokens=1")
    assert [finding.path for finding in found] == ["modle", "parallel.tp", "precision", "gate.tokens"]


def test_value_of_an_unknown_key_is_not_repeated() -> None:
    (found,) = problems("hf_token=hf_TESTSECRET123")
    assert "TESTSECRET" not in found.message + found.hint


def test_argument_split_by_the_shell_gets_the_quoted_form() -> None:
    (found,) = problems("model.path=/data/my", "model")
    assert "'model.path=/data/my model'" in found.hint


@pytest.mark.parametrize(
    "path",
    [
        "/data/epoch=3-step=10 (v1,a)@x%y#z",
        "/a|b/c d",
        "/it's",
        '/say "x"',
        "/back\\slash\\",
        "[a,b]",
        "{a: b}",
        "null and void",
        " leading",
        "~/home",
        "C:,d",
    ],
)
def test_text_is_taken_literally(path: str) -> None:
    assert parse([f"model.path={path}"], OPTIONS).values == {"model.path": path}


def test_literal_text_survives_composition() -> None:
    path = "/data/epoch=3-step=10 (v1,a)@x%y#z | 'b' \\"
    assert compose_config([f"model.path={path}"]).config.model.path == path


def test_text_from_the_environment_keeps_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", "/data/epoch=3 (a,b)@x%y#z")
    assert compose_config(["model.path=${oc.env:MODEL_DIR}"]).config.model.path == "/data/epoch=3 (a,b)@x%y#z"


def test_environment_variable_that_is_missing_is_named() -> None:
    (found,) = problems("model.path=${oc.env:NOT_THERE}")
    assert found.path == "model.path" and "NOT_THERE" in found.message


def test_quotes_around_a_value_are_taken_off() -> None:
    config = compose_config(["name='x'", 'model.path="/a b"']).config
    assert (config.name, config.model.path) == ("x", "/a b")


def test_values_are_typed() -> None:
    config = compose_config(
        ["limits.max_batch_size=8", "limits.max_seq_len=null", "policy.allow_reference=no", "frontend.triton=[a:1,b:2]"]
    ).config
    assert config.limits.max_batch_size == 8
    assert config.limits.max_seq_len is None
    assert config.policy.allow_reference is False
    assert config.frontend.triton == ["a:1", "b:2"]


def test_last_of_several_wins() -> None:
    composed = compose_config(["target=reference", "target=engine", "frontend.port=1", "frontend.port=2"])
    assert composed.choices["target"] == "engine"
    assert composed.config.frontend.port == 2


def test_command_line_is_stronger_than_config_yaml_is_stronger_than_option(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    text = (conf_root() / "config.yaml").read_text(encoding="utf-8")
    (mine / "config.yaml").write_text(text + "gate:\n  tokens: 77\n  window: 66\n", encoding="utf-8")
    gate = compose_config(["gate=standard", "gate.window=55"], config_dir=mine).config.gate
    assert (gate.tokens, gate.window, gate.stride) == (77, 55, 512)


def test_config_dir_adds_options_to_the_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("# a\n# b\npath: /data/own\n", encoding="utf-8")
    spec = compose(["model=own"], config_dir=tmp_path / "mine")
    assert (spec.model.name, spec.source.kind, spec.source.path) == ("own", "local", "/data/own")


def test_conf_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("other: program\n", encoding="utf-8")
    assert search_path() == (conf_root(),)
    assert compose_config([]).choices["model"] == "smollm2"


def test_config_dir_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        compose_config([], config_dir=Path("nowhere"))


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        ("pth: /x\n", "config-unknown-key", "model.pth"),
        ("gated: perhaps\n", "config-file", "gated"),
        ("path: [\n", "config-file", "own.yaml"),
        ("_target_: os.system\n", "config-names-code", "_target_"),
    ],
)
def test_faulty_file_is_named(tmp_path: Path, text: str, rule: str, words: str) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose_config(["model=own"], config_dir=tmp_path / "mine")
    (found,) = caught.value.findings
    assert found.rule == rule
    assert words in found.message


def test_composition_leaves_nothing_behind(tmp_path: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose_config([])
    assert not GlobalHydra.instance().is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_token_reaches_the_hub_client_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    spec = compose(["source.token=hf_TESTSECRET123"])
    assert os.environ["HF_TOKEN"] == "hf_TESTSECRET123"
    assert "TESTSECRET" not in repr(spec) + str(spec.as_dict())


def test_every_key_has_a_known_type() -> None:
    assert {leaf.kind for leaf in leaves().values()} == {int, float, bool, str, list, dict}


@pytest.mark.parametrize(
    ("arguments", "points"),
    [
        (["a=1"], [["a=1"]]),
        (["parallel.tp=1,2"], [["parallel.tp=1"], ["parallel.tp=2"]]),
        (["model=a,b", "x=1,2"], [["model=a", "x=1"], ["model=a", "x=2"], ["model=b", "x=1"], ["model=b", "x=2"]]),
        (["gate.tokens=range(1,4)"], [["gate.tokens=1"], ["gate.tokens=2"], ["gate.tokens=3"]]),
        (["model.path='a,b'"], [["model.path='a,b'"]]),
        (["frontend.triton=[a:1,b:2]"], [["frontend.triton=[a:1,b:2]"]]),
        (["model.path=/a (b,c"], [["model.path=/a (b,c"]]),
    ],
)
def test_sweep_makes_one_command_line_per_point(arguments: list[str], points: list[list[str]]) -> None:
    assert expand_sweep(arguments) == points


@pytest.mark.parametrize(
    "override",
    [
        "limits.max_batch_size=1_0",
        "limits.max_batch_size=\u0663",
        "triton.start_timeout_s=nan",
        "triton.start_timeout_s=inf",
        "gate.perplexity_ratio_max=inf",
        "store.root=null",
        "gate.text=nope",
    ],
)
def test_values_that_only_python_would_take_are_refused(override: str) -> None:
    (problem,) = problems(override)
    assert (problem.rule, problem.path) == ("config-bad-value", override.partition("=")[0])


@pytest.mark.parametrize("arguments", [["limits.max_batch_size=range(1,100000000)"], ["gate.tokens=range(2,99)"] * 2])
def test_sweep_beyond_measure_is_refused_at_once(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="more than 1000 points"):
        expand_sweep(arguments)
