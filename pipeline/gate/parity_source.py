"""Logits of the source by transformers, for the parity report: in this process, or in another interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError
from pipeline.gate.available import transformers_available
from pipeline.gate.oracle import RunProgram

F32 = npt.NDArray[np.float32]


class TransformersSource:
    """Asks transformers for the last logits of a text.

    Args:
        model: Hugging Face folder.
        scratch: Existing folder for requests and answers.
        interpreter: Python with torch and transformers; empty means this one.
        run_program: Starts it.
    """

    def __init__(self, model: Path, scratch: Path, interpreter: str, run_program: RunProgram) -> None:
        self._model, self._scratch = model, scratch
        self._interpreter, self._run = interpreter, run_program

    @staticmethod
    def is_available(model: Path, interpreter: str) -> bool:
        """Say whether the model is a folder and something can load it."""
        return (model / "config.json").is_file() and (bool(interpreter) or transformers_available())

    def __call__(self, token_ids: Sequence[int], compared: int) -> F32:
        """Return the logits of the last ``compared`` positions: [compared, vocab].

        Raises:
            ToolError: The other interpreter failed.
            SourceError: transformers cannot load the model.
        """
        if not self._interpreter:
            return _answer(self._model, token_ids, compared)
        request, answer = self._scratch / "parity.json", self._scratch / "parity.npy"
        content = {"model": str(self._model.resolve()), "ids": list(token_ids), "compared": compared}
        request.write_text(json.dumps({**content, "out": str(answer.resolve())}), encoding="utf-8")
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        program = "import sys; from pipeline.gate.parity_source import main; sys.exit(main(sys.argv[1:]))"
        self._run([self._interpreter, "-c", program, str(request)], environment, lambda line: None)
        found: F32 = np.load(answer)
        answer.unlink()
        request.unlink()
        return found


def _answer(model: Path, token_ids: Sequence[int], compared: int) -> F32:
    from pipeline.gate.transformers_engine import TransformersEngine

    return TransformersEngine(model, checkpoint_digest="").logits(token_ids)[-compared:]


def main(argv: Sequence[str]) -> int:
    """Run inside the other interpreter: read a request, write the logits."""
    request: dict[str, Any] = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        np.save(request["out"], _answer(Path(request["model"]), request["ids"], int(request["compared"])))
    except PipelineError as error:
        print(f"{error.message}\n{error.hint}".rstrip(), file=sys.stderr)
        return int(error.exit_code)
    return 0
