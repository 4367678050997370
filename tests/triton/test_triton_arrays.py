"""Arrays cross the python backend whole, whatever numpy this environment has: the stub was compiled for numpy 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.triton.install import TritonInstall
from pipeline.triton.model_config import python_model, write_config
from pipeline.triton.server import TritonServer
from pipeline.triton.tensors import Datatype, Tensor

pytestmark = pytest.mark.triton

VALUES: dict[Datatype, np.ndarray] = {
    "INT32": np.array([[1, -2, 3]], np.int32),
    "INT64": np.array([[2**40, -1]], np.int64),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT64": np.array([[2**63, 7]], np.uint64),
    "FP16": np.array([[1.5, 2.5, -0.25]], np.float16),
    "FP32": np.array([[1.5, np.inf]], np.float32),
    "BOOL": np.array([[True, False, True]]),
    "STRING": np.array([["Łódź".encode(), b"", b"\x00\xff"]], np.object_),
}
# Gives each input back as it came, and makes an array that is not contiguous and an empty one.
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(output_tensors=list(self.outputs(request))) for request in requests]

    def outputs(self, request):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name, array in arrays.items():
            tensor = pb_utils.Tensor(name.replace("in_", "out_"), array)
            assert tensor.as_numpy().tolist() == array.tolist()
            yield tensor
            if array.dtype == np.int32:
                yield pb_utils.Tensor("doubled", (array.repeat(2, axis=1) + 1)[:, ::2])
                yield pb_utils.Tensor("empty", np.zeros((1, 0), np.int32))
"""


@pytest.fixture(scope="module")
def client(triton_install: TritonInstall, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import tritonclient.grpc as grpc

    root = tmp_path_factory.mktemp("arrays")
    outputs = [Tensor(f"out_{name}", name, (-1,)) for name in VALUES]
    outputs += [Tensor("doubled", "INT32", (-1,)), Tensor("empty", "INT32", (-1,))]
    inputs = [Tensor(f"in_{name}", name, (-1,), optional=False) for name in VALUES]
    write_config(root / "echo", python_model("echo", inputs=inputs, outputs=outputs, max_batch_size=4))
    Path(root / "echo" / "1").mkdir()
    (root / "echo" / "1" / "model.py").write_text(CODE)
    with TritonServer(root, triton_install) as server:
        server.wait_ready(120)
        connected = grpc.InferenceServerClient(server.grpc_url)
        yield connected
        connected.close()


def test_every_datatype_comes_back_as_it_went(client: Any) -> None:
    import tritonclient.grpc as grpc

    tensors = []
    for name, array in VALUES.items():
        tensor = grpc.InferInput(f"in_{name}", list(array.shape), "BYTES" if name == "STRING" else name)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    result = client.infer("echo", tensors)
    for name, array in VALUES.items():
        assert result.as_numpy(f"out_{name}").tolist() == array.tolist()
        assert result.as_numpy(f"out_{name}").dtype == array.dtype
    assert result.as_numpy("doubled").tolist() == [[2, -1, 4]]
    assert result.as_numpy("empty").shape == (1, 0)
