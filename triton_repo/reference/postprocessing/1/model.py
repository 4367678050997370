"""Triton model ``postprocessing``: token ids to text.

Needs the tokenizers library and the files in ``tokenizer/`` beside this file, nothing else, and no network.

A stream is decoded without keeping state: each request brings the tokens that came before, and the answer is what they
and the new ones say together, less what they said alone. So spaces survive and no character is cut in two.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
REPLACEMENT = "\ufffd"


class TextDecoder:
    """Decodes ids with the tokenizer that was packed with the model.

    Args:
        folder: Holds ``tokenizer.json``.
        skip_special_tokens: Leave special tokens out of the text.
        end_ids: Ids that end a text; one at the end is dropped even when it is no special token.
    """

    def __init__(self, folder: Path, *, skip_special_tokens: bool, end_ids: Sequence[int] = ()) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._skip_special_tokens = skip_special_tokens
        self._end_ids = frozenset(end_ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a whole sequence."""
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def delta(self, before: list[int], new: list[int], *, is_last: bool) -> str:
        """Return what ``new`` adds to the text of ``before``.

        Bytes of an unfinished character are held back until the tokens that complete it come, or the sequence ends.
        """
        text = self.decode([*before, *new])
        said = self._settled(self.decode(before)) if before else ""
        return (text if is_last else self._settled(text))[len(said) :]

    @staticmethod
    def _settled(text: str) -> str:
        return text.rstrip(REPLACEMENT)


class TritonPythonModel:
    """Entry points that Triton calls."""

    def initialize(self, args) -> None:
        """Load the tokenizer beside this file."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._decoder = TextDecoder(
            HERE / "tokenizer",
            skip_special_tokens=parameters.get("skip_special_tokens", "true").lower() in ("1", "true"),
            end_ids=[int(part) for part in parameters.get("end_ids", "").split(",") if part],
        )

    def execute(self, requests) -> list:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        preceding = tensors.get("PRECEDING_IDS")
        is_last = "IS_LAST" not in tensors or bool(tensors["IS_LAST"].reshape(-1)[0])
        texts = []
        for row, (beams, lengths) in enumerate(zip(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"], strict=True)):
            before = [] if preceding is None else preceding[row].tolist()
            sequences = [ids[:length].tolist() for ids, length in zip(beams, lengths, strict=True)]
            texts.append([self._decoder.delta(before, ids, is_last=is_last).encode() for ids in sequences])
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))])
