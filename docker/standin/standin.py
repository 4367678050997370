"""What the stand-in tools do: check their arguments as NVIDIA's would, then write files of the same names and shapes.

Nothing is computed, and every file says so. Started through the programs that ``overlay.py`` lays out.

``STANDIN_FAULT`` makes a tool fail the way real ones have been seen to; ``TOOL:FAULT`` for one tool only:

=================  ====================================================================
exit-after-write   exits with 1 after the first output file
empty-file         exits with 0; the last output file has no bytes
missing-rank       exits with 0; the file of the last rank is missing
hang               never ends
out-of-memory      prints CUDA's words and exits with 1
killed             is killed, as by a machine without memory
=================  ====================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import upstream_parser

HERE = Path(__file__).resolve().parent
MARK = "stand-in: nothing in here was computed"


def main(tool: str) -> None:
    """Be ``tool`` for the arguments of this process."""
    if tool == "nvidia-smi":
        nvidia_smi(sys.argv[1:])
        return
    table = upstream_parser.load_table(HERE / "flags" / f"{tool.replace('/', '_')}.json")
    program = Path(sys.argv[0]).name
    values = upstream_parser.parse_or_exit(table, sys.argv[1:], prog=program)
    say(f"[TensorRT-LLM] TensorRT-LLM version: {release()} ({MARK})")
    if os.environ.get("STANDIN_NEEDS_GPU") and not gpu_ids():
        raise SystemExit("ValueError: max_workers must be greater than 0")
    before_work(fault(tool))
    if tool == "trtllm-build":
        build(values, fault(tool))
    else:
        convert(tool, values, fault(tool))


def convert(tool: str, values: Mapping[str, Any], failing: str) -> None:
    """Write ``config.json`` and one file for each rank, as a converter does."""
    source = Path(first(values, "model_dir", "ckpt_dir"))
    out = Path(first(values, "output_dir", "output_model_dir"))
    model = read_json(source / "config.json")
    if needs_calibration(tool, values):
        look_at_calibration(values)
    sizes = {key: int(values.get(f"{key}_size") or 1) for key in ("tp", "pp", "cp")}
    sizes["tp"] = int(values.get("world_size") or sizes["tp"])
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "producer": {"name": MARK, "version": release()},
        "architecture": model.get("architectures", ["LlamaForCausalLM"])[0],
        "dtype": values.get("dtype") or "float16",
        "vocab_size": model.get("vocab_size", 32000),
        "num_hidden_layers": model.get("num_hidden_layers", 1),
        "hidden_size": model.get("hidden_size", 8),
        "num_attention_heads": model.get("num_attention_heads", 1),
        "mapping": {"world_size": ranks, **{f"{key}_size": size for key, size in sizes.items()}},
        "quantization": {"quant_algo": values.get("qformat"), "kv_cache_quant_algo": values.get("kv_cache_dtype")},
        "arguments": {key: str(value) for key, value in values.items()},
    }
    write_json(out / "config.json", config)
    after_first_file(failing)
    weights = {rank: safetensors(rank) for rank in range(ranks)}
    write_ranks(out, "safetensors", weights, failing)


def build(values: Mapping[str, Any], failing: str) -> None:
    """Write ``config.json`` and one engine for each rank, as the builder does."""
    checkpoint, out = Path(first(values, "checkpoint_dir")), Path(values["output_dir"])
    config = read_json(checkpoint / "config.json")
    ranks = int(config.get("mapping", {}).get("world_size", 1))
    out.mkdir(parents=True, exist_ok=True)
    plugins = {key: value for key, value in values.items() if key.endswith("_plugin")}
    limits = {key: value for key, value in values.items() if key not in plugins and not key.endswith("_dir")}
    built = {"plugin_config": plugins, **{key: plain(value) for key, value in limits.items()}}
    write_json(out / "config.json", {"version": release(), "pretrained_config": config, "build_config": built})
    after_first_file(failing)
    engines = {}
    for rank in range(ranks):
        weights = checkpoint / f"rank{rank}.safetensors"
        if not weights.is_file():
            raise SystemExit(f"FileNotFoundError: No such file or directory: '{weights}'")
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        say(f"[TensorRT-LLM] Building engine of rank {rank}")
        engines[rank] = f"{MARK}\nrelease {release()}\nrank {rank}\nweights {digest}\n".encode().ljust(4096, b"\0")
    write_ranks(out, "engine", engines, failing)
    if values.get("output_timing_cache"):
        Path(values["output_timing_cache"]).write_bytes(MARK.encode())
    say("[TensorRT-LLM] Total time of building all engines: 00:00:00")


def write_ranks(out: Path, suffix: str, files: Mapping[int, bytes], failing: str) -> None:
    """Write the files of all ranks, the last one as badly as was asked for."""
    for rank, content in files.items():
        is_last = rank == max(files)
        if is_last and failing == "missing-rank":
            say("[ERROR] a worker has gone; its output is missing")
            continue
        (out / f"rank{rank}.{suffix}").write_bytes(b"" if is_last and failing == "empty-file" else content)


def needs_calibration(tool: str, values: Mapping[str, Any]) -> bool:
    """Say whether the real tool would read calibration data."""
    if tool == "quantize":
        return values.get("qformat") != "full_prec"
    return values.get("smoothquant") is not None or bool(values.get("int8_kv_cache"))


def look_at_calibration(values: Mapping[str, Any]) -> None:
    """Want the calibration data as a folder, as there is no network."""
    dataset = Path(str(values.get("calib_dataset")))
    if not dataset.is_dir() or not any(dataset.iterdir()):
        raise SystemExit(f"ConnectionError: Couldn't reach '{dataset}' on the Hub (offline mode is enabled)")


def fault(tool: str) -> str:
    """Return how ``tool`` should fail; empty for not at all."""
    wanted, _, kind = os.environ.get("STANDIN_FAULT", "").rpartition(":")
    return kind if wanted in ("", tool) else ""


def before_work(failing: str) -> None:
    """Fail the way that needs no output."""
    if failing == "hang":
        say("[TensorRT-LLM] working")
        while True:
            time.sleep(3600)
    if failing == "out-of-memory":
        say("[TensorRT-LLM] working")
        raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if failing == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def after_first_file(failing: str) -> None:
    """Fail with something written already."""
    if failing == "exit-after-write":
        raise SystemExit("RuntimeError: Engine building failed, please check error log.")


def nvidia_smi(arguments: list[str]) -> None:
    """Show the GPUs that the engine has given to the container."""
    ids = gpu_ids()
    if not ids:
        say("No devices were found")
        raise SystemExit(6)
    driver = os.environ.get("STANDIN_DRIVER") or read_json(HERE / "release.json")["driver"] or "590.44.01"
    known = {
        "name": "NVIDIA H100 80GB HBM3",
        "compute_cap": os.environ.get("STANDIN_COMPUTE_CAP", "9.0"),
        "memory.total": "81559",
        "driver_version": driver,
    }
    query = next((argument for argument in arguments if argument.startswith("--query-gpu=")), "--query-gpu=name,uuid")
    for number in ids:
        row = {**known, "uuid": f"GPU-standin-{number}"}
        say(", ".join(row[name] for name in query.partition("=")[2].split(",")))


def gpu_ids() -> list[str]:
    """Return the GPUs named by the variable that the container toolkit sets; none without it."""
    named = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if named == "all":
        return ["0", "1"]
    return [] if named in ("", "none", "void") else named.split(",")


def safetensors(rank: int) -> bytes:
    """Return a valid file with one 16-bit zero."""
    header: dict[str, Any] = {"__metadata__": {"about": MARK, "rank": str(rank)}}
    header["transformer.vocab_embedding.weight"] = {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text + b"\0\0"


def first(values: Mapping[str, Any], *names: str) -> str:
    """Return the first value that is there."""
    for name in names:
        if values.get(name):
            return str(values[name])
    raise SystemExit(f"TypeError: expected str, bytes or os.PathLike object, not NoneType ({names[0]})")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object or end as Python would."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    return document


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(document, indent=2, default=str), encoding="utf-8")


def plain(value: Any) -> Any:
    """Return a value that JSON has."""
    return str(value) if isinstance(value, Path) else value


def release() -> str:
    """Return the release that this is a stand-in for."""
    return str(read_json(HERE / "release.json")["release"])


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
