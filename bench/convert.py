"""Time and memory of ``checkpoint convert`` against copying the same file. Prints ratios from one run.

    python bench/convert.py [--megabytes 512] [--folder DIR]

Makes a random llama checkpoint in bfloat16, then for each case: the whole process, from start to exit, against
``cp`` + ``sync -f`` of the source file; and the peak memory above an interpreter that only imports numpy.
"""

from __future__ import annotations

import argparse
import json
import os
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
CONVERT = [sys.executable, "-m", "pipeline", "checkpoint", "convert"]
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
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {' '.join(argv)}")
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    """Run all cases and print a table. Each round times the copy and the conversion one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--model", type=Path, help="this model folder (one model.safetensors) in place of a random one")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_model(args.make, args.megabytes)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        work = Path(scratch)
        model = args.model or work / "model"
        if args.model is None:
            # In a process of its own: a child's peak memory starts with its parent's.
            timed([sys.executable, __file__, "--make", str(model), "--megabytes", str(args.megabytes)])
        weights = model / "model.safetensors"
        subprocess.run(["sync", "-f", str(work)], check=True)
        _, bare = timed([sys.executable, "-c", "import numpy, ml_dtypes"])
        print(f"source {weights.stat().st_size / 1e6:.0f} MB; best of {args.rounds} rounds")
        for title, options in CASES:
            print(f"{title:18s} {run_case(weights, work, options, args.rounds, bare)}")


def run_case(weights: Path, work: Path, options: list[str], rounds: int, bare: int) -> str:
    """Time copy and conversion in turn; returns a line with the best of each."""
    copy, out = work / "copy", work / "out"
    copies, conversions, peaks, written = [], [], [], 0
    for _ in range(rounds):
        copies.append(timed(["sh", "-c", f'cp "{weights}" "{copy}" && sync -f "{copy}"'])[0])
        copy.unlink()
        seconds, peak = timed([*CONVERT, str(weights.parent), str(out), *options])
        conversions.append(seconds)
        peaks.append(peak)
        written = sum(file.stat().st_size for file in out.iterdir())
        shutil.rmtree(out)
    best, base = min(conversions), min(copies)
    rate = (written / best) / (weights.stat().st_size / base)
    return (
        f"{best:6.2f} s = {best / base:5.2f} × cp + sync ({base:.2f} s); wrote {written / 1e6:.0f} MB, "
        f"{rate:.2f} × its throughput; peak {(max(peaks) - bare) / 1e6:+.0f} MB"
    )


if __name__ == "__main__":
    main()
