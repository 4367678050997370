"""A python-backend model with the tensors of tensorrt_llm that repeats its prompt, for tests and benchmarks.

The answer is the prompt again and again, up to ``request_output_len``, ``end_id`` or a stop word. Parameters:
``delay_ms`` before each token, ``journal`` a file that gets one line per finished or cancelled request.
"""

import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        read = {key: value["string_value"] for key, value in parameters.items()}
        self.delay_s = float(read.get("delay_ms", "0")) / 1000
        self.journal = Path(read["journal"]) if read.get("journal") else None
        outputs = [tensor["name"] for tensor in json.loads(args["model_config"])["output"]]
        self.says_reason = "finish_reason" in outputs
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            if self.delay_s:
                threading.Thread(target=self.answer, args=(request,), daemon=True).start()
            else:
                self.answer(request)

    def answer(self, request):
        sender = request.get_response_sender()
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        prompt = values["input_ids"].reshape(-1).tolist()
        limit = int(values["request_output_len"].reshape(-1)[0])
        end = int(values.get("end_id", np.array([-1])).reshape(-1)[0])
        words = values.get("stop_words_list")
        stops = set(words.reshape(2, -1)[0].tolist()) if words is not None else set()
        streaming = bool(values.get("streaming", np.array([False])).reshape(-1)[0])
        if len(prompt) == 13 and limit == 13:
            error = pb_utils.TritonError('File "/opt/model.py", line 1, in execute: secret trace')
            sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        made, reason = [], "length"
        for position in range(limit):
            token = prompt[position % len(prompt)]
            if token == end:
                reason = "stop"
                break
            if self.delay_s:
                time.sleep(self.delay_s)
                # Asked in a thread of its own, as the models of the repositories do: execute() is never held up.
                if request.is_cancelled():
                    reason = "cancelled"
                    break
            made.append(token)
            if streaming:
                sender.send(self.response([token], made, values))
            if token in stops:
                reason = "stop"
                break
        final = self.response([] if streaming else made, made, values, reason)
        if reason == "cancelled":
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(final, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if self.journal is not None:
            with self.lock, self.journal.open("a") as out:
                out.write(f"{request.request_id()} {reason} {len(made)} {sorted(values)}\n")

    def response(self, new, made, values, reason=None):
        tensors = [
            pb_utils.Tensor("output_ids", np.array([[new]], np.int32).reshape(1, 1, -1)),
            pb_utils.Tensor("sequence_length", np.array([[len(new)]], np.int32)),
        ]
        if "return_log_probs" in values:
            tensors.append(pb_utils.Tensor("output_log_probs", -np.array([[made]], np.float32).reshape(1, 1, -1) / 100))
        if reason is not None and self.says_reason:
            tensors.append(pb_utils.Tensor("finish_reason", np.array([[reason.encode()]], np.object_)))
        return pb_utils.InferenceResponse(tensors)
