"""Triton model ``tensorrt_llm_bls``: text in and out through the other models, with an optional draft engine.

Streams are exact: the parts of a stream add up to the text of the same answer in one piece, no character is cut in two
and no part of a stop string is shown. Needs numpy and what lies beside this file.
"""

import contextlib
import json
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bls_decoding import Drafting, TextStream, speculate, words_of  # noqa: E402

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
# What an answer that is put together from many cannot have.
_NOT_WITH_DRAFTS = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics")


class RequestError(ValueError):
    """The client asked for something impossible, or a model refused; the text goes back to it."""


class _Cancelled(Exception):
    """The client has left."""


class TritonPythonModel:
    """Entry points that Triton calls.

    With decoupled answers every request gets a thread of a pool, so one instance serves many requests, and a client
    that leaves is noticed between two tokens: whatever the engine still works on is stopped.
    """

    def initialize(self, args) -> None:
        """Read names of the other models and limits."""
        config = json.loads(args["model_config"])
        read = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._llm = read["tensorrt_llm_model_name"]
        self._draft = read.get("tensorrt_llm_draft_model_name", "")
        self._preprocessing = read["preprocessing_model_name"]
        self._postprocessing = read["postprocessing_model_name"]
        self._to_llm = dict(pair.split(":") for pair in read["engine_inputs"].split(","))
        self._draft_tokens = int(read.get("num_draft_tokens") or 0)
        self._max_draft_tokens = int(read.get("max_draft_tokens") or 0)
        self._max_seq_len = int(read.get("max_seq_len") or 0)
        self._use_draft_logits = read.get("use_draft_logits", "") == "true"
        self._own_outputs = {tensor["name"] for tensor in config["output"]}
        self._pool = ThreadPoolExecutor(int(read.get("concurrency") or 1), thread_name_prefix="request")

    def execute(self, requests):
        """Start the requests, or answer them one after another where a request gets one response."""
        if not self._is_decoupled:
            return [_Answer(self, request).single() for request in requests]
        for request in requests:
            self._pool.submit(_Answer(self, request).run)
        return None

    def finalize(self) -> None:
        """Let running requests end."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Answer:
    """One request that is being answered."""

    def __init__(self, model, request) -> None:
        self._model = model
        self._sender = request.get_response_sender() if model._is_decoupled else None
        self._inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self._wanted = set(request.requested_output_names())
        # Engines know requests by number; the client's id may be taken by its calls to other models.
        self._llm_id = str(secrets.randbelow(1 << 62) + 1)

    def run(self) -> None:
        """Answer with any number of responses."""
        is_stream, last = self._flag("stream"), None
        try:
            for outputs in self._responses():
                if is_stream:
                    self._sender.send(_response(outputs))
                    continue
                if last is not None:
                    self._sender.send(last)
                last = _response(outputs)
        except _Cancelled:
            last = None
        except Exception as error:
            last = _error(error)
        # One message where it can be: a client that leaves between a last answer and its end can bring Triton 24 down.
        if last is None:
            self._sender.send(flags=_FINAL)
        else:
            self._sender.send(last, flags=_FINAL)

    def single(self):
        """Return the one response."""
        try:
            if self._flag("stream"):
                raise RequestError("stream needs a model deployed using decoupled mode")
            outputs = list(self._responses())
        except Exception as error:
            return _error(error)
        if len(outputs) != 1:
            return _error(RequestError("several sequences in one request need a model deployed using decoupled mode"))
        return _response(outputs[0])

    def _responses(self):
        """Yield the outputs of each response."""
        if self._inputs["text_input"].size != 1:
            raise RequestError(f"text_input has {self._inputs['text_input'].size} texts, expected one per request")
        prepared = self._prepare()
        count = int(self._number("num_draft_tokens", self._model._draft_tokens))
        if count < 0 or (count and not self._model._draft):
            raise RequestError(f"num_draft_tokens is {count}, but this repository has no draft engine")
        if count > self._model._max_draft_tokens:
            raise RequestError(f"num_draft_tokens is {count}, the engine takes {self._model._max_draft_tokens}")
        return self._speculative(prepared, count) if count else self._plain(prepared)

    def _prepare(self):
        """Return the engine's inputs."""
        inputs = {theirs: self._inputs[ours] for ours, theirs in _TO_PREPROCESSING.items() if ours in self._inputs}
        outputs = next(iter(_call(self._model._preprocessing, inputs, list(_FROM_PREPROCESSING))))
        prepared = {theirs: outputs[name] for name, theirs in _FROM_PREPROCESSING.items()}
        prepared |= {theirs: self._inputs[ours] for ours, theirs in self._model._to_llm.items() if ours in self._inputs}
        return prepared

    def _plain(self, prepared):
        streams = {}
        is_stream = self._flag("stream")
        inputs = {**prepared, "streaming": np.array([[is_stream]])}
        passed = sorted((self._wanted & self._model._own_outputs) - {"text_output"})
        outputs = ["output_ids", "sequence_length", *passed]
        with _Calls(self, self._model._llm, inputs, outputs) as answers:
            for answer in answers:
                if "output_ids" not in answer:
                    continue
                rest = {name: answer[name] for name in passed if name in answer}
                ids, lengths = answer["output_ids"][0], answer["sequence_length"].reshape(-1)
                beams = [beam[:length].tolist() for beam, length in zip(ids, lengths, strict=True)]
                if not is_stream:
                    yield {"text_output": _texts([self._whole(beam) for beam in beams]), **rest}
                    continue
                if len(beams) > 1:
                    raise RequestError("a stream cannot have several beams")
                index = int(answer["sequence_index"].reshape(-1)[0]) if "sequence_index" in answer else 0
                stream = streams.setdefault(index, self._stream())
                if stream.is_stopped:
                    continue
                yield {"text_output": _texts([stream.add(beams[0])]), **rest}
                if all(each.is_stopped for each in streams.values()) and len(streams) >= self._sequences():
                    return
        for index, stream in streams.items():
            text = stream.end()
            if text:
                more = {"sequence_index": np.array([[index]], np.int32)} if "sequence_index" in passed else {}
                yield {"text_output": _texts([text]), **more}

    def _speculative(self, prepared, count):
        for name in _NOT_WITH_DRAFTS:
            if self._flag(name):
                raise RequestError(f"{name} is not possible with draft tokens")
        if self._sequences() > 1 or int(self._number("beam_width", 1)) > 1:
            raise RequestError("several sequences or beams are not possible with draft tokens")
        if not self._flag("exclude_input_in_output", True):
            raise RequestError("the prompt cannot be part of an answer with draft tokens")
        prompt = prepared["input_ids"][0].tolist()
        room = self._model._max_seq_len - len(prompt) if self._model._max_seq_len else 1 << 30
        steps, counts = _Steps(self, prepared), Drafting()
        rounds = speculate(
            prompt,
            max_tokens=max(min(int(prepared["request_output_len"].reshape(-1)[0]), room), 1),
            draft_tokens=count,
            stop_words=words_of(prepared["stop_words_list"][0].tolist()),
            draft=steps.draft,
            target=steps.target,
            counts=counts,
        )
        stream, is_stream, text, made = self._stream(), self._flag("stream"), "", 0
        for ids in rounds:
            made += len(ids)
            part = stream.add(ids)
            text += part
            if is_stream:
                yield {"text_output": _texts([part])}
            if stream.is_stopped:
                break
        rest = stream.end()
        numbers = {
            "num_input_tokens": np.array([[len(prompt)]], np.int32),
            "num_output_tokens": np.array([[made]], np.int32),
            "total_draft_tokens": np.array([[counts.drafted]], np.int32),
            "total_accepted_draft_tokens": np.array([[counts.accepted]], np.int32),
            "acceptance_rate": np.array([[counts.accepted / max(counts.drafted, 1)]], np.float32),
        }
        told = {name: value for name, value in numbers.items() if name in self._wanted & self._model._own_outputs}
        yield {"text_output": _texts([rest if is_stream else text + rest]), **told}

    def _stream(self):
        return TextStream(self._decode, self._stops())

    def _whole(self, ids) -> str:
        """Return the text of a whole sequence, cut at a stop string."""
        stream = self._stream()
        return stream.add(ids) + stream.end()

    def _decode(self, before, new, is_last) -> str:
        inputs = {
            "TOKENS_BATCH": np.array([[new]], np.int32).reshape(1, 1, -1),
            "SEQUENCE_LENGTH": np.array([[len(new)]], np.int32),
            "PRECEDING_IDS": np.array([before], np.int32).reshape(1, -1),
            "IS_LAST": np.array([[is_last]]),
        }
        outputs = next(iter(_call(self._model._postprocessing, inputs, ["OUTPUT"])))
        return outputs["OUTPUT"].reshape(-1)[0].decode("utf-8")

    def _stops(self) -> list:
        words = self._inputs.get("stop_words")
        return [] if words is None else [word.decode("utf-8") for word in words.reshape(-1)]

    def _sequences(self) -> int:
        return max(int(self._number("num_return_sequences", 1)), 1)

    def _flag(self, name, default=False) -> bool:
        return bool(self._number(name, default))

    def _number(self, name, default):
        values = self._inputs.get(name)
        return default if values is None or not values.size else values.reshape(-1)[0]

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._sender is not None and self._sender.is_cancelled()


class _Calls:
    """The answers of one call to an engine; leaving early stops what the engine still works on."""

    def __init__(self, answer, model, inputs, outputs) -> None:
        self._answer, self._model = answer, model
        self._is_done = False
        self._responses = iter(
            _call(model, inputs, outputs, request_id=answer._llm_id, decoupled=answer._model._is_decoupled)
        )

    def __enter__(self):
        return self._each()

    def __exit__(self, *_) -> None:
        if self._is_done or not self._answer._model._is_decoupled:
            return
        scalar = np.array([[1]], np.int32)
        stop = {"input_ids": scalar, "input_lengths": scalar, "request_output_len": scalar, "stop": np.array([[True]])}
        for _ignored in _call(self._model, stop, [], request_id=self._answer._llm_id, decoupled=True):
            pass
        with contextlib.suppress(RequestError):  # the engine answers what it had begun, then the call is over
            for _ignored in self._responses:
                pass

    def _each(self):
        try:
            for outputs in self._responses:
                yield outputs
                if self._answer.is_cancelled():
                    raise _Cancelled
        except RequestError:
            self._is_done = True
            raise
        self._is_done = True


class _Steps:
    """The two engines of speculative decoding, as functions of ids."""

    def __init__(self, answer, prepared) -> None:
        self._answer = answer
        self._model = answer._model
        self._prepared = prepared
        self._prompt = prepared["input_ids"].shape[1]
        self._uses_logits = bool(answer._number("use_draft_logits", self._model._use_draft_logits))

    def draft(self, ids, count):
        """Return what the draft engine says next, and its logits where they are used."""
        inputs = self._inputs(ids, count)
        wanted = ["output_ids", "sequence_length"]
        if self._uses_logits:
            inputs["return_generation_logits"] = np.array([[True]])
            wanted.append("generation_logits")
        outputs = self._one(self._model._draft, inputs, wanted)
        tokens = _tokens(outputs)
        return tokens, outputs["generation_logits"][:, 0, : len(tokens)] if self._uses_logits and tokens else None

    def target(self, ids, drafted, logits, count):
        """Return what the engine makes of the draft."""
        inputs = self._inputs(ids, count)
        if drafted:
            inputs["draft_input_ids"] = np.array([drafted], np.int32)
        if logits is not None:
            inputs["draft_logits"] = logits
        return _tokens(self._one(self._model._llm, inputs, ["output_ids", "sequence_length"]))

    def _inputs(self, ids, count):
        made = len(ids) - self._prompt
        inputs = {
            **self._prepared,
            "input_ids": np.array([ids], np.int32),
            "input_lengths": np.array([[len(ids)]], np.int32),
            "request_output_len": np.array([[count]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
        }
        for name in ("seed", "random_seed"):
            if name in inputs:  # each call starts anew; the same seed would draw the same number for every token
                inputs[name] = inputs[name] + np.uint64(made)
        for name in ("min_tokens", "min_length"):
            if name in inputs:
                inputs[name] = np.maximum(inputs[name] - made, 0).astype(np.int32)
        return inputs

    def _one(self, model, inputs, wanted):
        found = {}
        with _Calls(self._answer, model, inputs, wanted) as answers:
            for outputs in answers:
                found |= outputs
        if "output_ids" not in found:
            raise RequestError(f"{model} answered without output_ids")
        return found


def _tokens(outputs) -> list:
    return outputs["output_ids"][0][0][: int(outputs["sequence_length"].reshape(-1)[0])].tolist()


def _call(model, inputs, outputs, *, request_id="", decoupled=False):
    """Yield the outputs of each response of another model by name."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in inputs.items()],
        requested_output_names=outputs,
    )
    answers = request.exec(decoupled=decoupled)
    for response in answers if decoupled else [answers]:
        if response.has_error():
            raise RequestError(response.error().message())
        yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _texts(texts) -> np.ndarray:
    return np.array([[text.encode("utf-8") for text in texts]], np.object_)


def _response(outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def _error(error):
    if isinstance(error, RequestError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
    import traceback

    pb_utils.Logger.log_error(f"request failed: {''.join(traceback.format_exception(error))}")
    text = f"internal error in the text model: {type(error).__name__}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
