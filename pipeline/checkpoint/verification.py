"""Check a finished checkpoint: the files of all ranks, each tensor's name, shape and type."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.checkpoint.contract import expected_tensors
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.ledger import compare_targets
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.errors import Finding, SourceError

# Tensors that other converters also store. The model computes them at load, or folds them into others.
_DERIVED = re.compile(
    r"embed_positions(_for_gpt_attention)?|rotary_inv_freq|.*\.clamp_val|.*\.kv_cache_rcp_scaling_factor"
    r"|.*\.[kv]_cache_scaling_factor"
)


def verify_checkpoint(path: Path) -> list[Finding]:
    """Compare a checkpoint with what its own config.json demands. Reads headers, no weights.

    Args:
        path: Folder with ``config.json`` and ``rank{r}.safetensors``.

    Returns:
        One finding per problem; empty for a sound checkpoint.
    """
    try:
        config = load_config(path / "config.json")
        ranks = expected_tensors(config)
    except SourceError as error:
        return [Finding("checkpoint-config", "error", str(path / "config.json"), error.message, error.hint)]
    mapping = config.get("mapping", {})
    findings = []
    world = mapping.get("world_size", len(ranks))
    if world != len(ranks) * mapping.get("cp_size", 1):
        message = f"world_size is {world}; expected {len(ranks)} (tp_size × pp_size × cp_size)"
        findings.append(Finding("world-size", "error", str(path / "config.json"), message))
    for rank, expected in enumerate(ranks):
        file = path / f"rank{rank}.safetensors"
        if not file.is_file():
            message = f"missing; config.json says {len(ranks)} ranks"
            findings.append(Finding("missing-rank", "error", file.name, message))
            continue
        try:
            tensors = read_safetensors_header(file).tensors
        except SourceError as error:
            findings.append(Finding("damaged-file", "error", file.name, error.message, error.hint))
            continue
        found = {n: (i.shape, i.dtype) for n, i in tensors.items() if not _DERIVED.fullmatch(n) or n in expected}
        findings.extend(compare_targets(found, expected, file.name))
    names = {f"rank{rank}.safetensors" for rank in range(len(ranks))}
    for file in sorted(path.glob("rank*.safetensors*")):
        if file.name not in names:
            message = f"is not one of the {len(ranks)} rank files of this checkpoint"
            findings.append(Finding("unexpected-file", "error", file.name, message))
    return findings
