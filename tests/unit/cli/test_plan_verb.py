from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.cli.output import Output
from pipeline.cli.plan import document, make_plan, show
from pipeline.config import resolve
from pipeline.config.compose import Composed, compose_config, conf_root, options

OPTIONS = options([conf_root()])


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_plan_of_the_default_has_no_side_effects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, plan = plan_json(capsys, "hardware=cpu")
    assert code == 0
    assert plan["target"] == "reference"
    assert [stage["status"] for stage in plan["stages"]] == ["miss"] * len(plan["stages"])
    assert {stage["name"] for stage in plan["stages"]} >= {"fetch", "convert", "build", "validate", "emit", "verify"}
    assert all(stage["reason"] and stage["key"] for stage in plan["stages"])
    assert list(tmp_path.iterdir()) == []


def test_plan_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = plan_json(capsys, "model=llama2", "precision=fp8", "hardware=h100_80g")
    assert code == 0
    assert plan["schema_version"] == 1
    assert plan["target"] == "engine"
    assert plan["toolchain"] == {
        "name": "trtllm_1_2_1",
        "release": "1.2.1",
        "build_image": "nvcr.io/nvidia/tensorrt-llm/release:1.2.1",
        "serve_image": "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
    }
    assert plan["memory"]["fits"] is True
    (rank,) = plan["memory"]["per_gpu"]
    assert set(rank) == {
        "rank",
        "weights_bytes",
        "kv_bytes_per_token",
        "activations_bytes",
        "logits_bytes",
        "runtime_bytes",
        "total_bytes",
        "capacity_bytes",
        "max_concurrent_sequences",
    }
    assert rank["kv_bytes_per_token"] == 2 * 32 * 32 * 128 * 2
    for finding in plan["findings"]:
        assert set(finding) == {"rule", "severity", "path", "message", "hint"}
    for stage in plan["stages"]:
        assert set(stage) == {"name", "key", "status", "reason", "commands", "runner"}
        assert stage["status"] in ("hit", "miss", "unknown")
        assert len(stage["commands"]) == len(stage["runner"])


def test_plan_with_an_error_is_whole_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = plan_json(capsys, "model=llama2", "precision=fp8", "hardware=a100_80g", "limits.max_batch_size=5000")
    assert code == 3
    assert {"precision-gpu", "kv-overcommit"} <= {f["rule"] for f in plan["findings"] if f["severity"] == "error"}
    assert plan["memory"]["fits"] is False


def test_405b_on_eight_gpus_is_planned_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = plan_json(capsys, "model=llama3_405b", "precision=fp8", "parallel=tp8", "hardware=h100_80g")
    assert code == 0
    assert [rank["rank"] for rank in plan["memory"]["per_gpu"]] == list(range(8))
    # 405.9e9 weights at one byte, tables at two, over eight ranks with the embedding on each: 54 to 56 GB.
    assert all(54e9 < rank["weights_bytes"] < 56e9 for rank in plan["memory"]["per_gpu"])


def test_missing_source_is_a_finding_not_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = plan_json(capsys, "model=hf", "model.path=/not/there", "target=reference")
    assert code == 3
    assert "source-path" in {finding["rule"] for finding in plan["findings"]}


def test_plan_for_people_tells_target_model_memory_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama3_70b", "parallel=tp4", "precision=fp8", "hardware=h100_80g"]) == 0
    text = capsys.readouterr().out
    for words in ("engine: hardware=h100_80g names a GPU", "70.6B parameters", "0-3", "memory per GPU", "stages"):
        assert words in text
    assert max(map(len, text.splitlines())) < 220


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    """Every option of the groups that are crossed, typed."""
    from omegaconf import OmegaConf

    from pipeline.config.fields import sections

    found: dict[str, dict[str, Any]] = {}
    for group in ("model", "precision", "hardware", "parallel"):
        files = sorted(conf_root().glob(f"{group}/*.yaml"))
        schema = OmegaConf.structured(sections()[group])
        found[group] = {file.stem: OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(file))) for file in files}
    return found


def test_every_combination_is_planned_without_a_crash(parts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    base = compose_config(["hardware=cpu"])
    out = Output("json", stdout=(tmp_path / "out").open("w"), stderr=(tmp_path / "err").open("w"))
    count = 0
    # GPUs and splits take turns; test_plan_engine walks their whole product with fewer models.
    for number, (model, precision) in enumerate(itertools.product(OPTIONS["model"], OPTIONS["precision"])):
        hardware = OPTIONS["hardware"][number % len(OPTIONS["hardware"])]
        parallel = ("single", "tp4_pp2")[number // 7 % 2]
        chosen = {"model": model, "precision": precision, "hardware": hardware, "parallel": parallel}
        if model == "hf":
            continue
        for group, name in chosen.items():
            setattr(base.config, group, parts[group][name])
        spec = resolve.resolve(Composed(base.config, {**base.choices, **chosen}, base.search_path))
        plan = make_plan(spec)
        json.dumps(document(plan))
        if number % 3 == 0:
            show(plan, out)
        for finding in plan.findings:
            assert finding.message and finding.rule == finding.rule.lower()
            assert finding.severity != "error" or finding.hint
        count += 1
    out.stdout.close()
    out.stderr.close()
    assert count > 350


HEAVY = (
    *("torch", "transformers", "rich", "fastapi", "uvicorn", "tritonclient", "huggingface_hub", "tokenizers", "gguf"),
    *("safetensors", "jinja2", "pynvml"),
)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [(["plan"], HEAVY), (["plan", "model=llama2", "precision=fp8", "hardware=h100_80g"], (*HEAVY, "numpy"))],
    ids=["default", "engine"],
)
def test_plan_starts_without_heavy_packages(tmp_path: Path, arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from pipeline.cli.main import main\n"
        f"assert main({['--quiet', *arguments]!r}) == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
