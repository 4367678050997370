"""Triton model ``preprocessing``: text to token ids.

Needs the tokenizers library and the files in ``tokenizer/`` beside this file, nothing else, and no network.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
# What may stand before a stop word in the generated text and change how the word itself is cut into tokens.
CONTEXTS = ("", "a", "\n", ".", " ")


class TextEncoder:
    """Encodes prompts and words with the tokenizer that was packed with the model.

    Args:
        folder: Holds ``tokenizer.json``.
        add_special_tokens: Add what the tokenizer adds to a prompt, normally BOS.
    """

    def __init__(self, folder: Path, *, add_special_tokens: bool) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._add_special_tokens = add_special_tokens
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt. A BOS that the text brings itself is not added again."""
        plain = self._encode(text, special=False)
        if not self._add_special_tokens:
            return plain
        full = self._encode(text, special=True)
        added = next((k for k in range(len(full) - len(plain) + 1) if full[k : k + len(plain)] == plain), 0)
        prefix = full[:added]
        return full[added:] if prefix and plain[:added] == prefix else full

    def encode_word(self, word: str) -> list[int]:
        """Return the ids of a word that stands alone."""
        return self._encode(word, special=False)

    def word_variants(self, word: str) -> list[list[int]]:
        """Return the ways ``word`` may be cut into tokens inside a text, depending on what stands before it.

        Where the word melts into one token with its context, that token counts: a text that has it has the word.
        """
        variants = []
        for context in CONTEXTS:
            before, ids = self._encode(context, special=False), self._encode(context + word, special=False)
            shared = next(
                (k for k, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before)
            )
            if ids[shared:] and ids[shared:] not in variants:
                variants.append(ids[shared:])
        return variants

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids


class TritonPythonModel:
    """Entry points that Triton calls."""

    def initialize(self, args) -> None:
        """Load the tokenizer beside this file."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._encoder = TextEncoder(
            HERE / "tokenizer",
            add_special_tokens=parameters.get("add_special_tokens", "true").lower() in ("1", "true"),
        )
        self._end_ids = [int(part) for part in parameters.get("end_ids", "").split(",") if part]
        self._pad_id = int(parameters.get("pad_id") or 0)
        self._vocab_size = int(parameters.get("vocab_size") or self._encoder.vocab_size)

    def execute(self, requests) -> list:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._encode(tensors)
        except (ValueError, UnicodeDecodeError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"preprocessing: {error}"))
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, array) for name, array in outputs.items() if name in wanted]
        )

    def _encode(self, tensors) -> dict[str, np.ndarray]:
        prompts = [self._encoder.encode_prompt(text) for text in _texts(tensors["QUERY"])]
        if not all(prompts):
            raise ValueError("the prompt is empty")
        rows = len(prompts)
        pad_id = int(tensors["PAD_ID"][0][0]) if "PAD_ID" in tensors else self._pad_id
        end_id = int(tensors["END_ID"][0][0]) if "END_ID" in tensors else (self._end_ids or [-1])[0]
        # The backend knows one end id; the model's others end the text as stop words. Who names an end id means that.
        extra = [] if "END_ID" in tensors else [[token] for token in self._end_ids[1:]]
        variants = [ids for word in _texts(tensors.get("STOP_WORDS_DICT")) for ids in self._encoder.word_variants(word)]
        banned = [self._encoder.encode_word(word) for word in _texts(tensors.get("BAD_WORDS_DICT"))]
        longest = max(map(len, prompts))
        padded = [ids + [pad_id] * (longest - len(ids)) for ids in prompts]
        return {
            "INPUT_ID": np.array(padded, np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in prompts], np.int32),
            "REQUEST_OUTPUT_LEN": np.asarray(tensors["REQUEST_OUTPUT_LEN"], np.int32),
            "STOP_WORDS_IDS": np.repeat(word_list([*extra, *variants])[np.newaxis], rows, axis=0),
            "BAD_WORDS_IDS": np.repeat(word_list([ids for ids in banned if ids])[np.newaxis], rows, axis=0),
            "EMBEDDING_BIAS": np.repeat(self._bias(tensors)[np.newaxis], rows, axis=0),
            "OUT_END_ID": np.full((rows, 1), end_id, np.int32),
            "OUT_PAD_ID": np.full((rows, 1), pad_id, np.int32),
        }

    def _bias(self, tensors) -> np.ndarray:
        words = _texts(tensors.get("EMBEDDING_BIAS_WORDS"))
        weights = [] if "EMBEDDING_BIAS_WEIGHTS" not in tensors else tensors["EMBEDDING_BIAS_WEIGHTS"].reshape(-1)
        if len(words) != len(weights):
            raise ValueError(f"{len(words)} embedding_bias_words but {len(weights)} embedding_bias_weights")
        bias = np.zeros(self._vocab_size if words else 0, np.float32)
        for word, weight in zip(words, weights, strict=True):
            bias[self._encoder.encode_word(word)] += weight
        return bias


def word_list(words: list[list[int]]) -> np.ndarray:
    """Return [2, n] int32: all ids, and below them the end of each word, padded with -1; n is at least 1."""
    flat = [token for word in words for token in word] or [0]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32)
    offsets = np.full(len(flat), -1, np.int32)
    offsets[: len(ends)] = ends
    return np.stack([np.array(flat, np.int32), offsets])


def _texts(array) -> list[str]:
    return [] if array is None else [value.decode("utf-8") for value in array.reshape(-1) if value]
