"""Stage 7: load what was emitted in a real Triton server and ask it something."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import PipelineError, SourceError, ToolError
from pipeline.stages.base import StageContext
from pipeline.stages.emit import REPOSITORY
from pipeline.stages.manifest import write_json
from pipeline.store.files import link_or_copy

NAME = "verify.json"

_PROMPT = "The first rule of arithmetic is"
_NEW_TOKENS = 8


class VerifyStage:
    """Output: ``verify.json``: findings, and what the real server answered."""

    name = "verify"
    version = 1
    inputs: tuple[str, ...] = ("emit",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return, besides the input, whether a server can be had here: a result without one does not last."""
        from pipeline.triton.install import can_be_had

        return {**spec.identity_of("verify"), "server": can_be_had()}

    def run(self, context: StageContext) -> None:
        """Check the files, then load them where this machine can."""
        from pipeline.triton.verify import verify_repository

        repository = context.inputs["emit"] / REPOSITORY
        findings = verify_repository(repository)
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            raise SourceError("the emitted model repository does not hold together", findings=errors)
        document = {
            "findings": [[f.rule, f.severity, f.path, f.message] for f in findings],
            "loaded": _load(repository, context),
        }
        write_json(context.out / NAME, document)
        context.facts["loaded"] = document["loaded"]

    def check(self, path: Path) -> None:
        """The result is there."""
        if not (path / NAME).is_file():
            raise SourceError(f"verification wrote no {NAME}")


def _load(repository: Path, context: StageContext) -> dict[str, Any]:
    """Start a server on free ports, ask the ensemble for a few tokens, stop it."""
    from pipeline.triton.install import ensure_tritonserver
    from pipeline.triton.server import TritonServer

    context.progress(0, 3, "tritonserver")
    try:
        install = ensure_tritonserver()
    except PipelineError as error:
        # Not every machine that builds can run the server; the result says that it was not tried.
        context.log.warning("not loaded in a server: %s", error.message)
        return {"by": None, "reason": error.message}
    # A server writes byte code beside the models it imports; artefacts must stay as they are.
    copy = context.out / ".repository"
    _link_tree(repository, copy)
    with TritonServer(copy, install, log_path=context.log_path) as server:
        context.progress(1, 3, "tritonserver")
        server.wait_ready(context.spec.triton.start_timeout_s)
        context.progress(2, 3, "tritonserver")
        answer = _ask(server.grpc_url)
    shutil.rmtree(copy)
    context.progress(3, 3, "tritonserver")
    return {"by": f"tritonserver {install.release}", "prompt": _PROMPT, "answer": answer}


def _link_tree(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, copy)


def _ask(address: str) -> str:
    """Return the ensemble's greedy answer to a short prompt.

    Raises:
        ToolError: The server refused, or answered nothing.
    """
    import queue

    import numpy as np
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    def tensor(name: str, value: Any, kind: str) -> Any:
        item = grpc.InferInput(name, [1, 1], kind)
        item.set_data_from_numpy(value)
        return item

    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(
            "ensemble",
            [
                tensor("text_input", np.array([[_PROMPT.encode()]], dtype=np.object_), "BYTES"),
                tensor("max_tokens", np.array([[_NEW_TOKENS]], dtype=np.int32), "INT32"),
            ],
            request_id="verify",
        )
        try:
            answer = answers.get(timeout=120)
        except queue.Empty:
            raise ToolError("the emitted ensemble did not answer within 120 s") from None
        client.stop_stream()
    if isinstance(answer, InferenceServerException):
        raise ToolError(f"the emitted ensemble refused a plain request: {answer.message()}")
    text = b"".join(answer.as_numpy("text_output").reshape(-1)).decode("utf-8", "replace")
    if not text:
        raise ToolError("the emitted ensemble answered a plain request with nothing")
    return text
