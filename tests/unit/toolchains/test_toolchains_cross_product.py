"""Every cell of family × precision × cache × release × split × GPU: commands that the table takes, or an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from toolchain_jobs import ENGINE_RELEASES, LIMITS

from pipeline.toolchains.adapter import commands_for
from pipeline.toolchains.job import PRECISIONS, SMOOTHQUANT, Calibration, SourceQuantization, ToolJob
from pipeline.toolchains.release import load_release

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2", "starcoder2"),
    *("falcon", "internlm2"),
)
SOURCES = (SourceQuantization("gptq"), SourceQuantization("awq"), SourceQuantization("fp8", 8, 0))
CELLS: list[dict[str, Any]] = [
    *({"precision": p} for p in PRECISIONS if p not in ("smoothquant", "from_checkpoint")),
    *({"precision": "smoothquant", "smoothquant_algo": SMOOTHQUANT[kind]} for kind in ((False, False), (True, True))),
    *({"precision": "from_checkpoint", "source": source} for source in SOURCES),
]
SPLITS = ((2, 1), (4, 2))
GPUS = (80, 89, 90, 100, 120)


@pytest.mark.parametrize("version", ENGINE_RELEASES)
def test_every_cell_gives_accepted_commands_or_an_error(version: str) -> None:
    release = load_release(version)
    checked: set[tuple[str, tuple[str, ...]]] = set()
    with_commands = 0
    # One GPU is the trivial split: it goes through with every precision, but without the other KV caches.
    cells = itertools.chain(
        itertools.product(FAMILIES, CELLS, ("auto",), ((1, 1),), GPUS),
        itertools.product(FAMILIES, CELLS, ("auto", "int8", "fp8"), SPLITS, GPUS),
    )
    for family, cell, kv, (tp, pp), sm in cells:
        job = ToolJob(
            family=family, kv_cache=kv, tp=tp, pp=pp, sm=sm, dtype="bfloat16", gpu_count=8, limits=LIMITS,
            calibration=Calibration(), **cell,
        )  # fmt: skip
        commands, findings = commands_for(job, release)
        errors = [finding for finding in findings if finding.severity == "error"]
        assert bool(commands) != bool(errors), (job, findings)
        assert all(finding.message and finding.path for finding in findings)
        assert all(finding.hint for finding in errors), errors
        with_commands += bool(commands)
        for command in commands:
            if (command.tool, command.flags) in checked:
                continue
            checked.add((command.tool, command.flags))
            table = release.table(command.tool)
            parsed = table.parse(command.flags)
            assert parsed.accepted, (job, command.flags, parsed.error)
            # The real parser also takes abbreviations; what is emitted are full names.
            names = [word for word in command.flags if word.startswith("--")]
            assert all(table.find(name) for name in names)
            assert len(set(names)) == len(names)
    assert with_commands > 500


def test_emitted_commands_hold_no_host_path() -> None:
    for family, cell in itertools.product(FAMILIES, CELLS):
        job = ToolJob(family=family, sm=90, limits=LIMITS, calibration=Calibration(), **cell)
        for command in commands_for(job, load_release("1.2.1"))[0]:
            paths = [word for word in command.flags if word.startswith("/")]
            assert paths and all(path.startswith(("/in/", "/out")) for path in paths)
            targets = [mount.target for mount in command.mounts]
            used = {path for path in paths if path.startswith("/in/")}
            assert all(any(path.startswith(target) for target in targets) for path in used)
            assert [mount.name for mount in command.mounts if mount.writable] == ["out"]
            assert command.network == "none"
