"""Pinned command lines of representative recipes per release, and the support page.

``UPDATE_GOLDEN=1 pytest tests/unit/toolchains/test_toolchains_golden.py`` writes them anew; read the difference before
committing it.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from toolchain_jobs import ENGINE_RELEASES, run

from pipeline.toolchains.job import Calibration, Lora, SourceQuantization, Speculative
from pipeline.toolchains.matrix import gpu_table, support_document

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "argv"
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))

RECIPES: dict[str, dict[str, Any]] = {
    "llama2-fp16": {"family": "llama", "precision": "fp16"},
    "llama3_70b-fp8-tp8-fp8kv": {"family": "llama", "precision": "fp8", "kv_cache": "fp8", "tp": 8},
    "llama3_405b-fp8_rowwise-tp4-pp2": {"family": "llama", "precision": "fp8_rowwise", "tp": 4, "pp": 2},
    "mistral_7b-int8-int8kv": {"family": "mistral", "precision": "int8", "kv_cache": "int8", "sm": 80},
    "mixtral_8x7b-bf16-tp4-ep4": {"family": "mixtral", "precision": "bf16", "tp": 4, "moe_ep": 4},
    "qwen2_5_7b-smoothquant": {"family": "qwen2", "precision": "smoothquant", "sm": 80},
    "qwen3_8b-int4_awq": {"family": "qwen3", "precision": "int4_awq", "calibration": Calibration(32, 1024, 4)},
    "gemma2_9b-bf16-tp2-lora": {"family": "gemma2", "precision": "bf16", "tp": 2, "lora": Lora(16, ("attn_qkv",))},
    "phi3_mini-int4-profiles": {"family": "phi3", "precision": "int4", "multiple_profiles": True},
    "gpt2-fp16-streaming": {"family": "gpt2", "precision": "fp16", "weight_streaming": True, "sm": 80},
    "llama2-gptq-lookahead": {
        "family": "llama",
        "precision": "from_checkpoint",
        "source": SourceQuantization("gptq"),
        "speculative": Speculative("lookahead_decoding", window=7, ngram=7, verification=7),
    },
    "llama3_8b-nvfp4-b200": {"family": "llama", "precision": "nvfp4", "kv_cache": "fp8", "sm": 100},
}


def outcome(version: str) -> dict[str, Any]:
    """Return what every recipe comes to in a release."""
    results = {}
    for name, values in RECIPES.items():
        commands, findings = run(version, **values)
        results[name] = {
            "commands": [
                {"argv": shlex.join(c.argv), "mounts": [f"{m.name}:{m.target}" for m in c.mounts], "gpus": c.gpus}
                for c in commands
            ],
            "findings": [f"{finding.severity} {finding.rule} {finding.path}" for finding in findings],
        }
    return results


@pytest.mark.parametrize("version", ENGINE_RELEASES)
def test_commands_are_the_pinned_ones(version: str) -> None:
    path = GOLDEN / f"trtllm_{version.replace('.', '_')}.json"
    text = json.dumps(outcome(version), indent=1) + "\n"
    if UPDATE:
        path.write_text(text)
    assert json.loads(text) == json.loads(path.read_text()), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


def test_golden_recipes_mostly_give_commands() -> None:
    """A pinned error pins little: the default release makes all twelve."""
    assert all(result["commands"] for result in outcome("1.2.1").values())


def test_support_page_is_up_to_date() -> None:
    path = ROOT / "docs" / "support.md"
    if UPDATE:
        path.write_text(support_document())
    assert path.read_text() == support_document(), "docs/support.md is stale; UPDATE_GOLDEN=1 writes it anew"


def test_readme_table_of_gpus_is_up_to_date() -> None:
    """The README shows the same table between two markers, once it has one."""
    text = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
    start, end = "<!-- gpu-table -->\n", "<!-- /gpu-table -->"
    if start in text:
        assert text.partition(start)[2].partition(end)[0].strip() == gpu_table().strip()
