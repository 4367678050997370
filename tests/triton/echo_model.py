"""A python-backend model with the tensors of tensorrt_llm that repeats its prompt, for tests and benchmarks.

The answer is the prompt again and again, up to ``request_output_len``, ``end_id`` or a stop word. All requests go on at
the same time, a token each in turn, as an engine's batch does. Parameters: ``delay_ms`` before each token, ``journal``
a file that gets one line per finished or cancelled request.
"""

import json
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Live:
    """A request that is being answered."""

    def __init__(self, request, delay_s):
        self.request = request
        self.sender = request.get_response_sender()
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self.values = values
        self.prompt = values["input_ids"].reshape(-1).tolist()
        self.limit = int(values["request_output_len"].reshape(-1)[0])
        self.end = int(values.get("end_id", np.array([-1])).reshape(-1)[0])
        words = values.get("stop_words_list")
        self.stops = set(words.reshape(2, -1)[0].tolist()) if words is not None else set()
        self.streaming = bool(values.get("streaming", np.array([False])).reshape(-1)[0])
        self.made = []
        self.due_s = time.monotonic() + delay_s

    def step(self, delay_s):
        """Make the next token; return why there is none."""
        token = self.prompt[len(self.made) % len(self.prompt)]
        if len(self.made) >= self.limit:
            return "length"
        if token == self.end:
            return "stop"
        if delay_s and self.request.is_cancelled():
            return "cancelled"
        self.made.append(token)
        if self.streaming:
            self.sender.send(self.response([token]))
        self.due_s += delay_s
        return "stop" if token in self.stops else None

    def response(self, new, reason=None):
        tensors = [
            pb_utils.Tensor("output_ids", np.array([[new]], np.int32).reshape(1, 1, -1)),
            pb_utils.Tensor("sequence_length", np.array([[len(new)]], np.int32)),
        ]
        if "return_log_probs" in self.values:
            scores = -np.array([[self.made]], np.float32).reshape(1, 1, -1) / 100
            tensors.append(pb_utils.Tensor("output_log_probs", scores))
        if reason is not None:
            tensors.append(pb_utils.Tensor("finish_reason", np.array([[reason.encode()]], np.object_)))
        return pb_utils.InferenceResponse(tensors)


class TritonPythonModel:
    def initialize(self, args):
        sys.setswitchinterval(0.0005)  # execute() gets its turn while tokens are sent
        config = json.loads(args["model_config"])
        read = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self.delay_s = float(read.get("delay_ms", "0")) / 1000
        self.journal = Path(read["journal"]) if read.get("journal") else None
        self.says_reason = "finish_reason" in [tensor["name"] for tensor in config["output"]]
        self.inbox = queue.SimpleQueue()
        # A thread of its own, as in the models of the repositories: execute() is never held up.
        threading.Thread(target=self.serve, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            live = Live(request, self.delay_s)
            if len(live.prompt) == 13 and live.limit == 13:
                error = pb_utils.TritonError('File "/opt/model.py", line 1, in execute: secret trace')
                live.sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            else:
                self.inbox.put(live)

    def serve(self):
        running = []
        while True:
            running += self.arrived(running)
            now = time.monotonic()
            running = [live for live in running if live.due_s > now or not self.advance(live)]

    def arrived(self, running):
        """Return new requests; wait for one when there is nothing else to do."""
        timeout = max(0.0, min(live.due_s for live in running) - time.monotonic()) if running else None
        found = []
        try:
            found.append(self.inbox.get(timeout=timeout) if timeout != 0.0 else self.inbox.get_nowait())
            while True:
                found.append(self.inbox.get_nowait())
        except queue.Empty:
            return found

    def advance(self, live):
        """Go on with a request; return whether it ended."""
        reason = live.step(self.delay_s)
        if reason is None:
            return False
        if reason == "cancelled":
            live.sender.send(flags=FINAL)
        else:
            new = [] if live.streaming else live.made
            live.sender.send(live.response(new, reason if self.says_reason else None), flags=FINAL)
        if self.journal is not None:
            with self.journal.open("a") as out:
                out.write(f"{live.request.request_id()} {reason} {len(live.made)} {sorted(live.values)}\n")
        return True
