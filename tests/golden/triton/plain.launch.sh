#!/usr/bin/env bash
# Starts Triton for this repository, inside the serve image, with the repository mounted at /models.
set -euo pipefail

# In a container that has these GPUs only they are called 0, 1, …: set the variable before.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}"
exec /opt/tritonserver/bin/tritonserver --model-repository=/models --http-port=8000 --grpc-port=8001 --metrics-port=8002 --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=server0_rank0_ --exit-timeout-secs=30
