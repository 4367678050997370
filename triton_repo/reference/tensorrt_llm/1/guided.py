"""Guided decoding: which tokens may come next so that the answer matches a JSON schema, expression or grammar.

The work is llguidance's, which reads the tokenizer's own file. It is loaded with the first guided request: nobody else
pays for it.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

# As TensorRT-LLM names them; ``json`` is any object.
KINDS = ("json", "json_schema", "regex", "ebnf_grammar")
# Without a bound, an undecided model may write spaces between two values until its limit.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
MAX_GUIDE_CHARS = 1 << 20


class GuideError(ValueError):
    """The guide cannot be used; the text goes back to the client."""


class Guides:
    """Makes guides for one tokenizer.

    Args:
        tokenizer: ``tokenizer.json``.
        vocab_size: Of the engine.
        end_ids: Tokens that end an answer; allowed where the guide is satisfied.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [token for token in end_ids if token < vocab_size]
        self._tokens = None
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str) -> "Guide":
        """Return the guide of a request.

        Args:
            kind: One of ``KINDS``.
            text: Schema, expression or grammar (GBNF or Lark).

        Raises:
            GuideError: It is none, or is too complex.
        """
        if kind not in KINDS:
            raise GuideError(f"guided_decoding_guide_type is {kind[:64]!r}, expected one of {', '.join(KINDS)}")
        if len(text) > MAX_GUIDE_CHARS:
            raise GuideError(f"guided_decoding_guide has {len(text)} characters, expected at most {MAX_GUIDE_CHARS}")
        if not text and kind != "json":
            raise GuideError(f"guided_decoding_guide is empty, expected a {kind}")
        tokens = self._load()
        from llguidance import LLMatcher

        matcher = LLMatcher(tokens, _grammar(kind, text), log_level=0)
        if matcher.is_error():
            raise GuideError(f"guided_decoding_guide is no usable {kind}: {_short(matcher.get_error())}")
        return Guide(matcher, self._vocab_size)

    def _load(self):
        with self._lock:
            if self._tokens is None:
                try:
                    from llguidance import LLTokenizer

                    self._tokens = LLTokenizer(
                        self._path.read_text("utf-8"), n_vocab=self._vocab_size, eos_token=self._end_ids or None
                    )
                except ImportError as error:
                    raise GuideError("guided decoding is not supported here: llguidance is not installed") from error
                except Exception as error:  # llguidance raises what its Rust side gives
                    raise GuideError(f"guided decoding is not supported for this tokenizer: {error}") from error
            return self._tokens


class Guide:
    """A compiled guide; every sequence follows a copy of its own."""

    def __init__(self, matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def fresh(self) -> Callable[[Sequence[int]], np.ndarray]:
        """Return what the engine asks before each token of one sequence."""
        return _Follower(self._matcher.deep_copy(), self._vocab_size)


class _Follower:
    def __init__(self, matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._seen = 0
        self._is_over = False

    def __call__(self, output: Sequence[int]) -> np.ndarray:
        matcher = self._matcher
        for token in output[self._seen :]:
            # Where nothing but an end token could follow, that was it.
            self._is_over = matcher.is_stopped() or not matcher.consume_token(token)
        self._seen = len(output)
        if matcher.is_error():
            raise GuideError(f"guided decoding cannot go on: {_short(matcher.get_error())}")
        if self._is_over or matcher.stop_reason() == "EndOfSentence":
            return np.zeros(self._vocab_size, np.bool_)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)


def _grammar(kind: str, text: str) -> str:
    from llguidance import LLMatcher, grammar_from

    try:
        if kind == "json":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_OPTIONS)
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
        return grammar_from("regex" if kind == "regex" else "grammar", text)
    except ValueError as error:
        raise GuideError(f"guided_decoding_guide is no usable {kind}: {_short(str(error))}") from error


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
