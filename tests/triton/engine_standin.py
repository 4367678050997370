"""Takes the place of the C++ backend: the same config, another backend, a model that recites a text.

The token at a position depends on the position alone, so any way of asking gives the same text. Parameters:
``script`` the ids that are recited, ``end_at`` the position of the end id, ``wrong_every`` makes each n-th token
another one (a draft that is not always right), ``delay_ms`` before each token, ``journal`` gets a line per request.
"""

import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        read = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.script = [int(part) for part in read["script"].split(",")]
        self.end_at = int(read.get("end_at") or 1 << 30)
        self.wrong_every = int(read.get("wrong_every") or 0)
        self.delay_s = float(read.get("delay_ms") or 0) / 1000
        self.journal = Path(read["journal"]) if read.get("journal") else None
        self.declared = {tensor["name"] for tensor in config["output"]}
        self.is_decoupled = config["model_transaction_policy"]["decoupled"]
        self.stopped = set()
        self.lock = threading.Lock()

    def execute(self, requests):
        if not self.is_decoupled:
            return [pb_utils.InferenceResponse(self.answer(request, None)) for request in requests]
        for request in requests:
            threading.Thread(target=self.run, args=(request, request.get_response_sender()), daemon=True).start()
        return None

    def run(self, request, sender):
        last = self.answer(request, sender)
        if last is not None:
            sender.send(pb_utils.InferenceResponse(last))
        sender.send(flags=FINAL)

    def token(self, position, end_id):
        if position >= self.end_at:
            return end_id
        token = self.script[position % len(self.script)]
        return 40 if self.wrong_every and position % self.wrong_every == 0 else token

    def answer(self, request, sender):
        """Return the outputs of the last response; with a sender, streamed ones have been sent before."""
        values = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
        if values.get("stop", [False])[0]:
            self.stopped.add(request.request_id())
            return None
        ids, drafted = values["input_ids"].tolist(), values.get("draft_input_ids", np.array([], np.int32)).tolist()
        limit, end_id = int(values["request_output_len"][0]), int(values.get("end_id", [-1])[0])
        words = self.words(values.get("stop_words_list"))
        assert len(drafted) < limit or not drafted, "a draft needs room for one more token"
        made, reason = [], "length"
        while len(made) < limit:
            time.sleep(self.delay_s)
            if request.request_id() in self.stopped or (sender is not None and sender.is_cancelled()):
                reason = "stopped"
                break
            token = self.token(len(ids) + len(made), end_id)
            if token == end_id:
                reason = "end"
                break
            made.append(token)
            if values.get("streaming", [False])[0]:
                sender.send(pb_utils.InferenceResponse(self.outputs([token])))
            if any(made[-len(word) :] == word for word in words):
                reason = "word"
                break
            if drafted and (len(made) > len(drafted) or token != drafted[len(made) - 1]):
                reason = "draft"
                break
        if self.journal is not None:
            with self.lock, self.journal.open("a") as out:
                out.write(f"{reason} {len(made)} {len(drafted)}\n")
        return self.outputs([] if values.get("streaming", [False])[0] else made)

    @staticmethod
    def words(values):
        if values is None:
            return []
        ids, ends = values.reshape(2, -1).tolist()
        starts = [0, *ends]
        return [ids[start:end] for start, end in zip(starts, ends, strict=False) if end > 0]

    def outputs(self, ids):
        """Return the outputs that the config declares; others make Triton lose the response."""
        arrays = {
            "output_ids": np.array([[ids]], np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(ids)]], np.int32),
            "cum_log_probs": np.zeros((1, 1), np.float32),
            "output_log_probs": np.zeros((1, 1, len(ids)), np.float32),
            "generation_logits": np.zeros((1, 1, len(ids), 4), np.float32),
            "acceptance_rate": np.zeros((1, 1), np.float32),
        }
        integers = "batch_index sequence_index kv_cache_alloc_new_blocks kv_cache_reused_blocks"
        integers += " kv_cache_alloc_total_blocks total_accepted_draft_tokens total_draft_tokens"
        integers += " num_input_tokens num_output_tokens"
        arrays |= {name: np.zeros((1, 1), np.int32) for name in integers.split()}
        for name in ("arrival", "first_scheduled", "first_token", "last_token"):
            arrays[f"{name}_time_ns"] = np.zeros((1, 1), np.int64)
        return [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in self.declared]
