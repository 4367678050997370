"""Time and memory of ``checkpoint convert`` against copying the same file. Prints ratios from one run.

    python bench/convert.py [--megabytes 512] [--folder DIR]

Makes a random llama checkpoint in bfloat16, then for each case: the whole process, from start to exit, against
``cp`` + ``sync -f`` of the source file; and the peak memory above an interpreter that only imports numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
# The command line where it exists, else the same call without it.
CONVERT = (
    [sys.executable, "-m", "pipeline", "checkpoint", "convert"]
    if (ROOT / "pipeline" / "__main__.py").exists()
    else [
        sys.executable,
        "-c",
        "import argparse; from pipeline.checkpoint import commands; p = argparse.ArgumentParser(); "
        "commands.add_arguments(p); commands.main(p.parse_args())",
        "convert",
    ]
)
CASES = (
    ("same type, tp=1", ["--dtype", "bfloat16"]),
    ("to float16, tp=1", ["--dtype", "float16"]),
    ("to float16, tp=8", ["--dtype", "float16", "--tp", "8"]),
)


def make_model(folder: Path, megabytes: int) -> Path:
    """Write a llama with hidden size 2048 of about the wanted size; returns the weights file."""
    hidden, width, heads, kv_heads, vocab = 2048, 5632, 32, 8, 32000
    layer = hidden * (2 * hidden + 2 * hidden // 4 + 3 * width)
    layers = max(1, (megabytes * 1_000_000 // 2 - 2 * vocab * hidden) // layer)
    rng = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden), "lm_head.weight": weight(vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, rows, cols in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // 4, hidden),
            ("self_attn.v_proj", hidden // 4, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", width, hidden),
            ("mlp.up_proj", width, hidden),
            ("mlp.down_proj", hidden, width),
        ):
            tensors[f"{at}{name}.weight"] = weight(rows, cols)
        tensors[f"{at}input_layernorm.weight"] = weight(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = weight(hidden)
    tensors["model.norm.weight"] = weight(hidden)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def timed(argv: list[str]) -> tuple[float, int]:
    """Run a command; returns seconds and peak resident bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {' '.join(argv)}")
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument(
        "--model", type=Path, help="use this model folder (one model.safetensors) in place of a random one"
    )
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        work = Path(scratch)
        weights = args.model / "model.safetensors" if args.model else make_model(work / "model", args.megabytes)
        copy = work / "copy"
        script = f'rm -f "{copy}"; cp "{weights}" "{copy}" && sync -f "{copy}"'
        baseline = min(timed(["sh", "-c", script])[0] for _ in range(3))
        copy.unlink()
        _, bare = timed([sys.executable, "-c", "import numpy, ml_dtypes"])
        print(f"source {weights.stat().st_size / 1e6:.0f} MB, cp + sync {baseline:.2f} s")
        for title, options in CASES:
            out = work / "out"
            seconds, peak = timed([*CONVERT, str(weights.parent), str(out), *options])
            written = sum(file.stat().st_size for file in out.iterdir())
            shutil.rmtree(out)
            print(
                f"{title:20s} {seconds:6.2f} s = {seconds / baseline:5.2f} × cp, "
                f"wrote {written / 1e6:.0f} MB, peak {(peak - bare) / 1e6:+.0f} MB"
            )


if __name__ == "__main__":
    main()
