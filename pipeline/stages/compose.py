"""compose.yaml: Triton and the frontend on pinned images, for machines with a container engine."""

from __future__ import annotations

import yaml

from pipeline import __version__
from pipeline.config.spec import Spec

_HEADER = """\
# Triton and the OpenAI frontend for this model: `docker compose up`, then http://localhost:8000/v1.
# The frontend image is built once from the project: docker build -f docker/frontend.Dockerfile -t {image} .
"""


def compose_file(spec: Spec) -> str:
    """Return the text of compose.yaml. The model repository is mounted at ``/models``, everything read-only."""
    image = f"trtllm-pipeline-frontend:{__version__}"
    triton_health = "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')\""
    frontend_health = "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready')\""
    document = {
        "name": spec.name.lower(),
        "services": {
            "triton": {
                "image": spec.toolchain.serve_image,
                "command": ["tritonserver", "--model-repository=/models", "--exit-timeout-secs=30"],
                "volumes": ["./model_repository:/models:ro"],
                "shm_size": "1gb",
                "init": True,
                "stop_grace_period": "40s",
                "healthcheck": _health(triton_health, start="300s"),
            },
            "frontend": {
                "image": image,
                "command": [
                    "frontend",
                    "frontend.triton=[triton:8001]",
                    "frontend.tokenizer=/tokenizer",
                    f"frontend.model={spec.frontend.model}",
                    f"frontend.tool_parser={spec.frontend.tool_parser}",
                    "frontend.host=0.0.0.0",
                    "frontend.port=8000",
                ],
                "volumes": ["./tokenizer:/tokenizer:ro"],
                "ports": ["8000:8000"],
                "read_only": True,
                "tmpfs": ["/tmp"],
                "init": True,
                "stop_grace_period": "40s",
                "depends_on": {"triton": {"condition": "service_healthy"}},
                "healthcheck": _health(frontend_health, start="30s"),
            },
        },
    }
    body: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return _HEADER.format(image=image) + body


def _health(command: str, *, start: str) -> dict[str, object]:
    return {"test": ["CMD-SHELL", command], "interval": "10s", "timeout": "5s", "retries": 3, "start_period": start}
