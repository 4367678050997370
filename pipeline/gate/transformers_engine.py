"""transformers as an :class:`Engine`: the witness that knows nothing of this project. Imports torch when made."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import EngineInfo, Generation
from pipeline.engines.reference.request import Request
from pipeline.errors import PreflightError, SourceError


class TransformersEngine:
    """A causal language model of transformers, with float32 arithmetic on the weights as stored.

    Args:
        folder: Model folder (config.json, safetensors). Remote code is never run, pickles are never opened.
        checkpoint_digest: Names the weights; the gate compares it with the candidate's.
        dtype: Arithmetic; weights of another type are converted.
    """

    def __init__(self, folder: Path, *, checkpoint_digest: str, dtype: str = "float32") -> None:
        try:
            torch: Any = importlib.import_module("torch")
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise PreflightError(
                f"the transformers baseline needs {error.name}, which this interpreter lacks",
                hint="set gate.baseline_python to an interpreter that has torch and transformers (the oracle extra)",
            ) from error
        self._torch = torch
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise SourceError(f"{folder}: transformers cannot load it: {error}") from error
        self._model = model.eval()
        self._info = EngineInfo(
            kind="transformers",
            checkpoint_digest=checkpoint_digest,
            vocab_size=int(model.config.vocab_size),
            max_seq_len=int(model.config.max_position_embeddings),
        )
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__, "arithmetic": dtype}

    @property
    def info(self) -> EngineInfo:
        """Say which engine this is."""
        return self._info

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits of every position: [tokens, vocab] float32."""
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([list(token_ids)]), use_cache=False)
        logits: npt.NDArray[np.float32] = output.logits[0].float().numpy()
        return logits

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Continue each request greedily, one after the other; sampling settings are ignored."""
        return [self._continue(request) for request in requests]

    def _continue(self, request: Request) -> Generation:
        torch = self._torch
        made: list[int] = []
        fed, cache = torch.tensor([list(request.token_ids)]), None
        with torch.inference_mode():
            while len(made) < request.max_tokens:
                output = self._model(fed, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                made.append(int(output.logits[0, -1].float().argmax()))
                if made[-1] in request.end_ids:
                    return Generation(request.request_id, tuple(made), "stop")
                fed = torch.tensor([[made[-1]]])
        return Generation(request.request_id, tuple(made), "length")


def end_ids_of(folder: Path) -> tuple[int, ...]:
    """Read the ids that end a text from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
