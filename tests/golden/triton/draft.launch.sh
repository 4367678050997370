#!/usr/bin/env bash
# Starts Triton for this repository, inside the serve image, with the repository mounted at /models.
set -euo pipefail

# In a container that has these GPUs only they are called 0, 1, …: set the variable before.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0,1}"
exec env TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1 mpirun --allow-run-as-root -n 1 /opt/tritonserver/bin/tritonserver --model-repository=/models --http-port=8000 --grpc-port=8001 --metrics-port=8002 --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=server0_rank0_ --exit-timeout-secs=30 --pinned-memory-pool-byte-size=0 --enable-peer-access=false --cuda-memory-pool-byte-size=0:0 --cuda-memory-pool-byte-size=1:0
