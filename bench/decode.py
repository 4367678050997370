"""Decode speed of the reference engine against transformers on the same checkpoint, in float32, with equal threads.

    python bench/decode.py CHECKPOINT --oracle-python PYTHON [--threads N] [--batch 1 16] [--rounds 7]

PYTHON is an interpreter with torch, transformers and safetensors. Both sides run in processes of their own and take
turns, so that a busy machine slows both. The result is the ratio of the fastest rounds, since a neighbour can only
slow a round; the ratio of the medians shows how disturbed the run was. Both decode greedily; the tokens must agree.

Ours is measured through its scheduler and sampler, step by step. ``--peer generate`` (default) asks transformers in
the same way, through ``generate``; ``--peer loop`` calls the bare model in a loop, which is faster and does less.

With several threads, a busy machine makes transformers' threads spin against each other: there, set
OMP_WAIT_POLICY=PASSIVE in the environment, or take --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 16
TARGETS = {1: 1.3, 16: 0.95}

# A runner prepares a batch of prompts and returns a function that decodes so many tokens of each.
Runner = Callable[[list[list[int]]], Callable[[int], list[list[int]]]]


def reference_runner(checkpoint: Path, threads: int) -> Runner:
    """Run the project's engine."""
    sys.path.insert(0, str(ROOT))
    from pipeline.engines.reference import ReferenceEngine, Request

    engine = ReferenceEngine.load(checkpoint, threads=threads, max_batch_size=64, max_num_tokens=64 * PROMPT_TOKENS)

    def prepare(prompts: list[list[int]]) -> Callable[[int], list[list[int]]]:
        engine.abort_all()
        made: dict[str, list[int]] = {str(row): [] for row in range(len(prompts))}

        def step() -> None:
            for event in engine.step():
                if event.token_id is not None:
                    made[event.request_id].append(event.token_id)

        for row, prompt in enumerate(prompts):
            engine.submit(Request(str(row), tuple(prompt), 1000))
        step()

        def decode(count: int) -> list[list[int]]:
            for _ in range(count):
                step()
            return list(made.values())

        return decode

    return prepare


def transformers_runner(checkpoint: Path, threads: int, peer: str) -> Runner:
    """Run transformers on the same weights, put back under their Hugging Face names."""
    import torch
    from safetensors.torch import load_file
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    c = json.loads((checkpoint / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        head_dim=c["head_size"],
        max_position_embeddings=c["max_position_embeddings"],
        rms_norm_eps=c["norm_epsilon"],
        rope_theta=c["rotary_base"],
        rope_scaling=c["rotary_scaling"],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(_hugging_face_names(load_file(checkpoint / "rank0.safetensors"), c))

    def prepare(prompts: list[list[int]]) -> Callable[[int], list[list[int]]]:
        cache = DynamicCache()
        ids = torch.tensor(prompts)
        made: list[Any] = []

        def step() -> None:
            nonlocal ids
            ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
            made.append(ids)

        step()

        def loop(count: int) -> list[list[int]]:
            for _ in range(count):
                step()
            tokens: list[list[int]] = torch.cat(made, dim=1).tolist()
            return tokens

        def generate(count: int) -> list[list[int]]:
            sequence = torch.cat([torch.tensor(prompts), ids], dim=1)
            found = model.generate(
                sequence,
                attention_mask=torch.ones_like(sequence),
                past_key_values=cache,
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            tokens: list[list[int]] = found[:, PROMPT_TOKENS:].tolist()
            return tokens

        return {"loop": loop, "generate": generate}[peer]

    return prepare


def _hugging_face_names(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    renamed = {
        "attention.dense": "self_attn.o_proj",
        "mlp.fc": "mlp.gate_proj",
        "mlp.gate": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
        "post_layernorm": "post_attention_layernorm",
        "vocab_embedding": "embed_tokens",
        "ln_f": "norm",
    }
    rows = [config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]]
    out = {}
    for name, value in tensors.items():
        place, _, module = name.removesuffix(".weight").replace("transformer.", "model.").rpartition(".")
        if place.endswith((".attention", ".mlp")):
            place, _, block = place.rpartition(".")
            module = f"{block}.{module}"
        if module == "attention.qkv":
            parts = value.split([heads * config["head_size"] for heads in rows])
            for letter, part in zip("qkv", parts, strict=True):
                out[f"{place}.self_attn.{letter}_proj.weight"] = part
        else:
            out[f"{place}.{renamed.get(module, module)}.weight".removeprefix(".")] = value
    return out


def serve(kind: str, checkpoint: Path, threads: int, peer: str) -> None:
    """Answer one JSON line per request on stdin: decode and say how long it took."""
    is_ours = kind == "reference"
    runner = reference_runner(checkpoint, threads) if is_ours else transformers_runner(checkpoint, threads, peer)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        decode = runner(job["prompts"])
        start = time.perf_counter()
        tokens = decode(job["steps"])
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)


class Side:
    """One of the two processes."""

    def __init__(self, python: str, kind: str, args: argparse.Namespace) -> None:
        threads = str(args.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
        command = [python, __file__, str(args.checkpoint), "--serve", kind, "--threads", threads, "--peer", args.peer]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Run one job in the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "steps": steps}) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._answer()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process {self._process.args!r} ended early")
        return line


def compare(sides: list[Side], batch: int, rounds: int, vocab_size: int) -> float:
    """Print and return the ratio of speeds at one batch size."""
    prompts = [[(7 * row + 13 * place + 17) % vocab_size for place in range(PROMPT_TOKENS)] for row in range(batch)]
    steps = 24 if batch == 1 else 8
    speeds: list[list[float]] = [[], []]
    for _ in range(rounds):
        results = [side.decode(prompts, steps) for side in sides]
        for speed, result in zip(speeds, results, strict=True):
            speed.append(batch * steps / result["seconds"])
        same = sum(a == b for a, b in zip(results[0]["tokens"], results[1]["tokens"], strict=True))
        if same < batch:
            print(f"  note: {batch - same} of {batch} sequences differ (a near tie of two logits, or an error)")
    best, usual = [max(speed) for speed in speeds], [statistics.median(speed) for speed in speeds]
    ratio = best[0] / best[1]
    target = f" (target {TARGETS[batch]})" if batch in TARGETS else ""
    print(
        f"batch {batch:2d}: reference {best[0]:6.1f} tokens/s, transformers {best[1]:6.1f} tokens/s, "
        f"ratio {ratio:.2f}{target}; medians {usual[0]:.1f} and {usual[1]:.1f}, ratio {usual[0] / usual[1]:.2f}",
        flush=True,
    )
    return ratio


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="TensorRT-LLM checkpoint of a llama model, one rank")
    parser.add_argument("--oracle-python", default=sys.executable, help="interpreter with torch and transformers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", choices=["generate", "loop"], default="generate")
    parser.add_argument("--serve", choices=["reference", "transformers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.checkpoint, args.threads, args.peer)
        return
    vocab_size = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    sides = [
        Side(sys.executable, "reference", args),
        Side(args.oracle_python, "transformers", args),
    ]
    print(f"{args.checkpoint}, float32, {args.threads} threads each, transformers through {args.peer}")
    ratios = {batch: compare(sides, batch, args.rounds, vocab_size) for batch in args.batch}
    for side in sides:
        side.close()
    if any(ratio < TARGETS.get(batch, 0) for batch, ratio in ratios.items()):
        raise SystemExit("a ratio is below its target; repeat on a quiet machine before believing it")


if __name__ == "__main__":
    main()
