"""What runs inside ModelOpt's own environment: quantize a Hugging Face model and export it.

Needs torch, transformers and nvidia-modelopt, and nothing of this package: it is started as a file.

    python modelopt_program.py REQUEST.json
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Our names to ModelOpt's predefined configurations.
_CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}


def main(path: str) -> int:
    """Read a request, write the checkpoint to its ``out``."""
    request: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    mtq: Any = importlib.import_module("modelopt.torch.quantization")
    export: Any = importlib.import_module("modelopt.torch.export")
    torch.manual_seed(0)
    dtype = getattr(torch, request["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=dtype, use_safetensors=True, trust_remote_code=False
    ).eval()
    model.config.use_cache = False
    # transformers 5 keeps the base elsewhere, where the exporter does not look.
    rope = getattr(model.config, "rope_parameters", None)
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        model.config.rope_theta = rope["rope_theta"]

    def calibrate(target: Any) -> None:
        with torch.inference_mode():
            for number, ids in enumerate(request["sequences"], 1):
                target(torch.tensor([ids]))
                print(f"progress {number} {len(request['sequences'])} sequences", flush=True)

    mtq.quantize(model, _settings(mtq, request), calibrate)
    if request["format"] == "hf":
        export.export_hf_checkpoint(model, dtype=dtype, export_dir=request["out"])
    else:
        export.export_tensorrt_llm_checkpoint(
            model,
            request["family"],
            dtype=dtype,
            export_dir=request["out"],
            inference_tensor_parallel=request["tp"],
            inference_pipeline_parallel=request["pp"],
        )
    return 0


def _settings(mtq: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's configuration for the request."""
    settings: dict[str, Any] = copy.deepcopy(getattr(mtq, _CONFIGS[request["quant"]]))
    if request["kv_cache"] == "fp8":
        settings["quant_cfg"] = [*settings["quant_cfg"], *copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])]
    if request["quant"] == "int8_sq" and request["alpha"] is not None:
        settings["algorithm"] = {"method": "smoothquant", "alpha": request["alpha"]}
    if request["quant"] in ("int4_awq", "w4a8_awq"):
        for entry in settings["quant_cfg"]:
            configured = entry.get("cfg")
            for part in configured if isinstance(configured, list) else [configured]:
                if isinstance(part, dict) and part.get("num_bits") == 4 and "block_sizes" in part:
                    part["block_sizes"][-1] = request["group_size"]
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
