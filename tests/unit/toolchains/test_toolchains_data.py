"""The data files: complete, consistent with each other and with the configuration that ships."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from toolchain_jobs import ENGINE_RELEASES

from pipeline.errors import ConfigError
from pipeline.facts.shipped import shipped
from pipeline.toolchains.arguments import accepts
from pipeline.toolchains.job import family_names, find_family
from pipeline.toolchains.release import (
    DATA,
    data,
    engine_findings,
    load_release,
    release_versions,
    version_key,
)


def _yaml(path: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    return dict(content)


ALL_TABLES = [(v, tool) for v in release_versions() for tool in load_release(v).document["tables"]]


@pytest.mark.parametrize("version", release_versions())
def test_release_file_is_named_after_its_release(version: str) -> None:
    release = load_release(version)
    assert release.version == version
    assert release.name == f"trtllm_{version.replace('.', '_')}"
    assert load_release(release.name) is release


def test_every_release_file_is_listed_in_the_index() -> None:
    files = {json.loads(path.read_text())["release"] for path in DATA.glob("trtllm_*.json")}
    assert files == set(release_versions())


@pytest.mark.parametrize("version", ENGINE_RELEASES)
def test_engine_release_names_both_images_and_its_tools(version: str) -> None:
    release = load_release(version)
    assert release.build_image.startswith("nvcr.io/nvidia/")
    assert release.serve_image.endswith("-trtllm-python-py3")
    assert release.has_table("trtllm-build") and release.has_table("quantize")
    assert release.script("quantize").endswith("/quantization/quantize.py")
    # Whole releases have the five converters; before 0.20 their flags were never verified.
    converters = {tool for tool in release.document["tables"] if tool.startswith("convert/")}
    whole = {f"convert/{family}" for family in ("llama", "qwen", "gemma", "phi", "gpt")}
    assert converters == (whole if release.at_least("0.20.0") else set())


@pytest.mark.parametrize(("version", "tool"), ALL_TABLES)
def test_flag_table_is_well_formed(version: str, tool: str) -> None:
    table = load_release(version).table(tool)
    assert table.document["tool"] == tool.partition("/")[0]
    assert version in table.document["releases"]
    assert table.confidence in ("high", "medium", "low", "unverified")
    for flag in table.flags.values():
        assert re.fullmatch(r"--[a-zA-Z0-9_-]+", flag.name)
        assert flag.type in ("int", "float", "str", "path", "bool", "list[str]", "enum", "enum:KVCacheType")
        assert flag.is_switch == (flag.type == "bool")
        if flag.choices and flag.default is not None:
            assert flag.default in flag.choices


@pytest.mark.parametrize(
    ("version", "count"),
    # Numbers of flags in the rendered command references.
    [("0.18.2", 66), ("0.19.0", 70), ("0.20.0", 70), ("0.21.0", 70), ("1.0.0", 70), ("1.1.0", 70), ("1.2.1", 67)],
)
def test_build_table_has_every_flag_of_the_reference(version: str, count: int) -> None:
    assert len(load_release(version).table("trtllm-build").flags) == count


def test_defaults_that_changed_between_releases_are_in_the_tables() -> None:
    old, new = (load_release(v).table("trtllm-build").flags for v in ("0.18.2", "0.19.0"))
    assert (old["--tokens_per_block"].default, new["--tokens_per_block"].default) == (64, 32)
    assert (old["--use_paged_context_fmha"].default, new["--use_paged_context_fmha"].default) == ("disable", "enable")
    assert "--auto_parallel" in load_release("1.1.0").table("trtllm-build").flags
    assert "--auto_parallel" not in load_release("1.2.1").table("trtllm-build").flags
    assert "trace" not in load_release("0.20.0").table("trtllm-build").flags["--log_level"].choices
    assert "trace" in load_release("0.21.0").table("trtllm-build").flags["--log_level"].choices


def test_route_flags_exist_in_some_release_with_the_value_they_are_given() -> None:
    for tool, facts in data("routes")["tools"].items():
        tables = [load_release(v).table(tool) for v in ENGINE_RELEASES if load_release(v).has_table(tool)]
        assert tables, tool
        fixed = {**facts.get("fixed", {}), **facts.get("calibrating", {})}
        for flags in (fixed, *(m.get("flags", {}) for group in ("makes", "kv_cache") for m in facts[group].values())):
            for name, value in flags.items():
                filled = isinstance(value, str) and value.startswith("$")
                assert any(t.find(name) if filled else accepts(t, name, value) for t in tables), (tool, name, value)
        assert all(tables[-1].find(name) for name in facts["nouns"].values()), tool


def test_route_algorithms_are_in_the_support_matrix() -> None:
    known = data("support")["algorithms"]
    for facts in data("routes")["tools"].values():
        assert {made["algorithm"] for made in facts["makes"].values()} <= set(known)


@pytest.mark.parametrize("name", family_names())
def test_family_points_to_things_that_exist(name: str) -> None:
    family = find_family(name)
    assert family is not None and family.name == name
    assert not family.row or family.row in data("support")["models"]["rows"]
    assert family.script in load_release("1.2.1").document["convert_scripts"]
    assert family.quantize in ("yes", "no", "unverified")


def test_families_of_the_shipped_models_are_known() -> None:
    for path in sorted((shipped("conf") / "model").glob("*.yaml")):
        model = _yaml(path)
        architecture = (model.get("architecture") or {}).get("architecture")
        if architecture:
            family = find_family(architecture)
            assert family is not None, path.name
            assert family.name == model["family"], path.name


def test_toolchain_options_agree_with_the_release_files() -> None:
    options = sorted((shipped("conf") / "toolchain").glob("*.yaml"))
    assert {path.stem for path in options} >= {load_release(v).name for v in ENGINE_RELEASES}
    for path in options:
        if path.stem == "latest":  # an option that exists to be refused
            continue
        option, release = _yaml(path), load_release(path.stem)
        assert option["release"] == release.version
        assert option["build_image"] == release.build_image
        assert option["builds_engines"] == release.builds_engines
        if not release.builds_engines:
            continue
        assert option["serve_image"] == release.serve_image
        assert option["cuda"] == release.document["versions"]["cuda"]
        assert option["driver_min"] == release.document["driver"]["floor"]


def test_data_stays_small() -> None:
    assert sum(path.stat().st_size for path in Path(DATA).rglob("*.json")) < 600_000


@pytest.mark.parametrize("version", ["latest", "1.3.0rc21", "1.3.0rc22", "1.3.0", "1.4.0", "trtllm_1_4_0", "1.4.2rc3"])
def test_engine_is_refused_where_the_builder_is_gone(version: str) -> None:
    (finding,) = engine_findings(version)
    assert (finding.rule, finding.severity) == ("release-without-engines", "error")
    assert "removed the engine builder" in finding.message
    assert "toolchain=trtllm_1_2_1" in finding.hint and "target=llmapi" in finding.hint


def test_engine_is_refused_for_a_release_without_data() -> None:
    assert [f.rule for f in engine_findings("1.3.0rc20")] == ["release-unknown"]
    assert engine_findings("1.2.1") == []


def test_load_release_names_the_nearest_when_unknown() -> None:
    with pytest.raises(ConfigError, match="no TensorRT-LLM release") as caught:
        load_release("1.2.2")
    assert caught.value.hint == "toolchain=trtllm_1_2_1"


def test_versions_order_candidates_before_finals() -> None:
    versions = ["0.19.0", "0.20.0", "1.2.1", "1.3.0rc9", "1.3.0rc20", "1.3.0rc21", "1.3.0", "1.4.0"]
    assert sorted(versions, key=version_key) == versions
