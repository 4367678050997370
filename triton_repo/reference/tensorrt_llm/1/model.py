"""Triton model ``tensorrt_llm`` for target=reference: token ids in and out, answered by the reference engine.

Speaks the tensors of the tensorrtllm backend. Everything it needs lies beside this file: the engine in ``reference/``
and the checkpoint (``config.json``, ``rank0.safetensors``), and ``tokenizer.json`` where guided decoding is on.
Needs numpy and safetensors; guided requests need llguidance too.
"""

import json
import queue
import sys
import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from guided import Guides  # noqa: E402
from llm_request import Limits, RequestError, parse_calls  # noqa: E402
from llm_response import Sequence  # noqa: E402
from reference import EngineLoop, ReferenceEngine  # noqa: E402

CANCEL_POLL_S = 0.04
# The answering thread gets its turn after this long while the engine computes; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.001
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_WAKE = object()
_END = object()


class _Live:
    """A Triton request that is being answered."""

    def __init__(self, request, sender) -> None:
        self.sender = sender
        self.request_id = request.request_id()
        self.wanted = frozenset(request.requested_output_names())
        self.sequences = {}
        self.open_ids = set()
        self.is_cancelled = False

    def take(self, event) -> None:
        """Give an event to its sequence."""
        self.sequences[event.request_id].add(event)

    def is_open(self, engine_id) -> bool:
        """Whether the sequence has not been answered to its end."""
        return engine_id in self.open_ids


class TritonPythonModel:
    """Entry points that Triton calls.

    ``execute`` only hands requests to the engine's loop. One thread takes the engine's events, sends the responses and
    looks for cancelled clients, so that the engine never waits for Triton; tokens that pile up meanwhile leave in one
    response.
    """

    def initialize(self, args) -> None:
        """Load the engine beside this file."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        threads = int(parameters.get("threads") or 0)
        engine = ReferenceEngine.load(
            HERE,
            max_batch_size=int(parameters["max_num_sequences"]),
            max_seq_len=int(parameters["max_seq_len"]),
            threads=threads or None,
        )
        self._limits = Limits(
            vocab_size=engine.info.vocab_size,
            max_seq_len=engine.info.max_seq_len,
            exclude_input=parameters.get("exclude_input_in_output", "").lower() in ("1", "true"),
        )
        self._guides = None
        if parameters.get("guided_decoding_backend"):
            end_ids = [int(token) for token in parameters.get("end_ids", "").split(",") if token]
            self._guides = Guides(HERE / "tokenizer.json", engine.info.vocab_size, end_ids)
        self._loop = EngineLoop(engine)
        self._lock = threading.Lock()
        self._live = []
        self._count = 0
        self._events = queue.SimpleQueue()
        self._answering = threading.Thread(target=self._answer, name="answers", daemon=True)
        self._answering.start()

    def execute(self, requests) -> None:
        """Start the requests; the answers come from the other thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except RequestError as error:
                _send_error(sender, str(error))
            except Exception as error:  # the client must get an answer, and the log the traceback
                import traceback

                pb_utils.Logger.log_error(f"request failed: {traceback.format_exc()}")
                _send_error(sender, f"internal error in the reference model: {type(error).__name__}")

    def finalize(self) -> None:
        """End the engine and the answering thread."""
        self._loop.close()
        self._events.put(_END)
        self._answering.join(10)

    def _start(self, request, sender) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if bool(tensors.get("stop", [[False]])[0][0]):
            self._stop(request.request_id(), sender)
            return
        self._count += 1
        calls = parse_calls(tensors, self._limits, self._count, self._guides)
        if not self._is_decoupled:
            _refuse_for_one_response(calls)
        live = _Live(request, sender)
        submissions = []
        for row, call in enumerate(calls):
            for index, engine_request in enumerate(call.engine_requests(f"{self._count}.{row}")):
                live.sequences[engine_request.request_id] = Sequence(call, row, index)
                submissions.append(engine_request)
        live.open_ids.update(live.sequences)
        with self._lock:
            self._live.append(live)
        self._events.put(_WAKE)  # from now on there is somebody to watch for a cancel, also before the first token
        try:
            for engine_request in submissions:
                self._loop.submit(engine_request, lambda event: self._events.put((live, event)))
        except Exception:
            live.open_ids, submitted = set(), live.open_ids
            for engine_id in submitted:
                self._loop.cancel(engine_id)
            self._forget(live)
            raise

    def _stop(self, request_id, sender) -> None:
        if not request_id:
            raise RequestError("stop needs the request id of the request to stop")
        with self._lock:
            found = [live for live in self._live if live.request_id == request_id]
        for live in found:
            self._cancel(live)
        sender.send(pb_utils.InferenceResponse(output_tensors=[]), flags=_FINAL)

    def _cancel(self, live) -> None:
        live.is_cancelled = True
        for engine_id in tuple(live.open_ids):
            self._loop.cancel(engine_id)

    def _answer(self) -> None:
        next_poll = 0.0
        while True:
            with self._lock:
                is_idle = not self._live
            items = self._wait_for_events(None if is_idle else max(next_poll - time.monotonic(), 0.0))
            changed = {}
            for item in items:
                if item is _END:
                    return
                if item is not _WAKE:
                    live, event = item
                    live.take(event)
                    changed[event.request_id] = live
            for engine_id, live in changed.items():
                self._send(live, engine_id)
            if time.monotonic() >= next_poll:
                self._look_for_cancelled()
                next_poll = time.monotonic() + CANCEL_POLL_S

    def _wait_for_events(self, timeout) -> list:
        items = []
        try:
            items.append(self._events.get(timeout=timeout))
            while True:
                items.append(self._events.get_nowait())
        except queue.Empty:
            return items

    def _send(self, live, engine_id) -> None:
        """Send what is due of one sequence; the last of all sequences carries the final flag."""
        sequence = live.sequences[engine_id]
        if not (live.is_open(engine_id) and sequence.is_due):
            return
        if sequence.finish_reason is not None:
            live.open_ids.discard(engine_id)
        if sequence.finish_reason == "error":
            self._cancel(live)
            live.open_ids.clear()
            _send_error(live.sender, sequence.error)
        else:
            tensors = [pb_utils.Tensor(name, array) for name, array in sequence.take(live.wanted).items()]
            flags = 0 if live.open_ids else _FINAL
            live.sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)
        if not live.open_ids:
            self._forget(live)

    def _forget(self, live) -> None:
        with self._lock:
            self._live = [other for other in self._live if other is not live]

    def _look_for_cancelled(self) -> None:
        with self._lock:
            running = [live for live in self._live if not live.is_cancelled]
        for live in running:
            if live.sender.is_cancelled():
                self._cancel(live)


def _refuse_for_one_response(calls) -> None:
    if any(call.streaming for call in calls):
        raise RequestError("Streaming is only supported if model is deployed using decoupled mode")
    if len(calls) > 1 or calls[0].sequences > 1:
        raise RequestError("several rows or sequences in one request need a model deployed using decoupled mode")


def _send_error(sender, text) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), flags=_FINAL)
