"""What is said about a server that did not come up. The log lines are from tritonserver 2.51."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pipeline.triton.server import failure_reasons, free_port, port_is_free, remove_stale_regions, telling_lines

LOG = [
    'W1130 14:46:48.674396 16885 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"',
    'E1130 14:46:48.674789 16885 server.cc:241] "CudaDriverHelper has not been initialized."',
    'E1130 14:46:51.470576 16885 backend_model.cc:692] "ERROR: Failed to create instance: ModuleNotFoundError: '
    "No module named 'tokenizers'\\n\\nAt:\\n  /r/1/model.py(30): __init__\\n\"",
    "E1130 14:46:51.470778 16885 model_lifecycle.cc:642] \"failed to load 'postprocessing' version 1: Internal: "
    "ModuleNotFoundError: No module named 'tokenizers'\\n\\nAt:\\n  /r/1/model.py(30): __init__\\n\"",
    'I1130 14:46:51.487507 16885 server.cc:336] "All models are stopped, unloading models"',
]


def test_reason_is_the_failed_model_without_the_traceback() -> None:
    assert failure_reasons(LOG)[0] == (
        "failed to load 'postprocessing' version 1: Internal: ModuleNotFoundError: No module named 'tokenizers'"
    )


def test_complaints_about_the_missing_gpu_are_no_reason() -> None:
    assert failure_reasons(LOG[:2]) == []


def test_reason_of_a_server_that_lost_a_stub_says_so() -> None:
    log = [
        *LOG[:2],
        "terminate called after throwing an instance of 'boost::interprocess::lock_exception'",
        "  what():  boost::interprocess::lock_exception",
        "Signal (6) received.",
        " 0# 0x000055686D3CB52D in /opt/bin/tritonserver",
        "10# _Unwind_RaiseException in /lib/x86_64-linux-gnu/libgcc_s.so.1",
        "",
    ]
    assert failure_reasons(log)[0].startswith("the python process of a model died")
    assert telling_lines(log) == log[2:5]


def test_quoted_lines_are_not_the_table_of_options() -> None:
    table = ["+------+---+", "| strict_readiness | 1 |", "| cache_enabled | 0 |", "+------+---+", ""] * 5
    quoted = telling_lines([*LOG[2:], *table, "error: creating server: Internal - failed to load all models"])
    assert quoted[0] == LOG[2]
    assert quoted[-1].startswith("error: creating server")
    assert len(quoted) == 3
    assert len(telling_lines(["x" * 900])[0]) < 250


def test_free_port_can_be_bound_and_a_listening_one_is_not_free() -> None:
    port = free_port()
    assert port_is_free(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not port_is_free(port)


def test_shared_memory_of_dead_starters_is_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest process id Linux gives
    for name in (f"trtllm_pipeline_{dead}_ab_1", f"trtllm_pipeline_{os.getpid()}_ab_1", "psm_other"):
        (tmp_path / name).touch()
    remove_stale_regions(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["psm_other", f"trtllm_pipeline_{os.getpid()}_ab_1"]
