"""Engine folders as the builder writes them, with empty-handed engines: for configs and checks, not for running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triton_models import VOCAB_SIZE

PLUGINS = {"use_paged_context_fmha": True, "gpt_attention_plugin": "auto", "lora_plugin": None}


def write_engine(folder: Path, *, release: str = "1.2.1", tp: int = 1, pp: int = 1, **changes: Any) -> Path:
    """Write ``config.json`` and one file per rank.

    ``changes`` go into the builder's part; ``plugins``, ``logits_dtype`` and ``dtype`` where they belong.
    """
    plugins = {**PLUGINS, **changes.pop("plugins", {})}
    model = {
        "architecture": "LlamaForCausalLM",
        "dtype": changes.pop("dtype", "float16"),
        "logits_dtype": changes.pop("logits_dtype", "float32"),
        "vocab_size": changes.pop("vocab_size", VOCAB_SIZE),
        "max_position_embeddings": 4096,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
    }
    build = {
        "max_input_len": 2047,
        "max_seq_len": 2048,
        "max_batch_size": 8,
        "max_beam_width": 1,
        "max_num_tokens": 4096,
        "kv_cache_type": "PAGED",
        "gather_context_logits": False,
        "gather_generation_logits": False,
        "speculative_decoding_mode": 1,
        "max_draft_len": 0,
        "weight_streaming": False,
        **changes,
        "plugin_config": plugins,
    }
    folder.mkdir(parents=True, exist_ok=True)
    document = {"version": release, "pretrained_config": model, "build_config": build}
    (folder / "config.json").write_text(json.dumps(document, indent=1))
    for rank in range(tp * pp):
        (folder / f"rank{rank}.engine").write_bytes(f"engine {rank}".encode())
    return folder
