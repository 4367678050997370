"""The whole pipeline on a tiny local model, through the command line."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command_line import TINY_MODEL, environment, pipeline, start, tiny_job

STAGES = ("fetch", "convert", "build", "baseline", "validate", "emit", "verify")

pytestmark = pytest.mark.triton


def test_run_ends_with_what_where_verdict_and_next_command(tiny: Path) -> None:
    ended = pipeline(*tiny_job(), cwd=tiny)

    last = ended.stdout.splitlines()[-5:]
    assert ended.code == 0
    assert "tiny-llama in fp16 for target=reference" in last[0]
    assert last[1].split() == ["where", "dist/tiny"]
    assert last[2].split() == ["verdict", "passed"]
    assert "-m pipeline serve target=reference" in last[3]
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in last[4]


def test_run_reuses_everything_when_nothing_changed(tiny: Path) -> None:
    ended = pipeline("run", "--json", *tiny_job(), cwd=tiny)

    assert [(stage["name"], stage["status"]) for stage in ended.document["stages"]] == [(n, "hit") for n in STAGES]


def test_run_reuses_everything_when_only_ports_change(tiny: Path) -> None:
    ended = pipeline("run", "--json", *tiny_job("frontend.port=9999", "triton.http_port=9998"), cwd=tiny)

    assert {stage["status"] for stage in ended.document["stages"]} == {"hit"}


def test_dist_holds_what_the_contract_lists(tiny: Path) -> None:
    dist = tiny / "dist" / "tiny"

    names = {path.name for path in dist.iterdir() if not path.name.startswith(".")}
    assert names == {
        "manifest.json",
        "model_repository",
        "tokenizer",
        "frontend",
        "compose.yaml",
        "report.html",
        "junit.xml",
        "gate.json",
    }
    models = {path.name for path in (dist / "model_repository").iterdir()}
    assert models == {"tensorrt_llm", "preprocessing", "postprocessing", "ensemble"}
    assert not [path for path in dist.rglob("*") if path.is_symlink()]
    assert ElementTree.parse(dist / "junit.xml").getroot().get("failures") == "0"


def test_manifest_lists_the_digest_of_every_file(tiny: Path) -> None:
    dist = tiny / "dist" / "tiny"
    manifest = json.loads((dist / "manifest.json").read_text())

    found = {
        path.relative_to(dist).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dist.rglob("*")
        # A server that ran on the folder leaves byte code beside the models.
        if path.is_file() and path.name not in ("manifest.json", ".export.json") and "__pycache__" not in path.parts
    }
    assert found == manifest["files"]
    assert manifest["target"] == "reference"
    assert manifest["gate"]["verdict"] == "passed"


def test_no_emitted_text_names_a_folder_of_this_machine(tiny: Path) -> None:
    for path in (tiny / "dist" / "tiny").rglob("*"):
        if path.is_file() and path.suffix in (".json", ".pbtxt", ".py", ".yaml", ".html", ".xml"):
            if path.name == ".export.json":
                continue
            text = path.read_text(encoding="utf-8")
            assert str(tiny) not in text and str(TINY_MODEL) not in text, path


def test_result_is_the_same_in_another_folder_with_other_hash_seed_and_workers(tiny: Path, tmp_path: Path) -> None:
    ended = pipeline("run", "--json", *tiny_job(), cwd=tmp_path, env={"PYTHONHASHSEED": "4711"})

    first = pipeline("run", "--json", *tiny_job(), cwd=tiny).document["stages"]
    assert [stage["artefact"] for stage in ended.document["stages"]] == [stage["artefact"] for stage in first]


def test_plan_says_hit_for_what_was_made_and_why_not_for_the_rest(tiny: Path) -> None:
    hits = pipeline("plan", "--json", *tiny_job(), cwd=tiny).document["stages"]
    other = pipeline("plan", "--json", *tiny_job("precision=bf16"), cwd=tiny).document["stages"]

    assert {stage["status"] for stage in hits} == {"hit"}
    by_name = {stage["name"]: stage for stage in other}
    assert by_name["fetch"]["status"] == "hit"
    assert by_name["baseline"]["status"] == "hit", "the baseline is shared by all precisions"
    assert by_name["convert"]["status"] == "miss"
    assert "float16 → 'bfloat16'".replace("'", "") in by_name["convert"]["reason"].replace("'", "")


@pytest.mark.parametrize("stage", STAGES)
def test_killed_run_continues_and_keeps_what_was_finished(stage: str, tmp_path: Path) -> None:
    """SIGKILL arrives while the stage works: its start was announced, its end not yet."""
    process = start(*tiny_job(), cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.split()[:2] == [stage, "start"]:
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    ended = pipeline("run", "--json", *tiny_job(), cwd=tmp_path)

    assert ended.code == 0, ended.stderr
    status = {entry["name"]: entry["status"] for entry in ended.document["stages"]}
    before = STAGES[: STAGES.index(stage)]
    assert {name: status[name] for name in before} == dict.fromkeys(before, "hit")
    assert pipeline("store", "verify", cwd=tmp_path).code == 0
    assert json.loads((tmp_path / "dist/tiny/manifest.json").read_text())["gate"]["verdict"] == "passed"


def _damaged(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    return model


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda m: _cut(m / "model.safetensors", 100), "model.safetensors", id="truncated"),
        pytest.param(
            lambda m: (m / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
            ),
            "Git-LFS",
            id="lfs-pointer",
        ),
        pytest.param(lambda m: (m / "model.safetensors").unlink(), "no", id="no-weights"),
        pytest.param(lambda m: (m / "config.json").write_text("{"), "config.json", id="broken-config"),
    ],
)
def test_damaged_source_names_the_file_and_makes_nothing(damage: object, expected: str, tmp_path: Path) -> None:
    model = _damaged(tmp_path)
    damage(model)  # type: ignore[operator]

    ended = pipeline("run", "--json", *tiny_job(model=model), cwd=tmp_path)

    assert ended.code == 3
    message = ended.document["error"]["message"] + json.dumps(ended.document["findings"])
    assert expected.lower() in message.lower()
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "dist").exists()


def test_two_models_at_the_same_path_do_not_share_results(tmp_path: Path) -> None:
    """Known fault F9: same path, same sizes, equal times."""
    model = _damaged(tmp_path)
    weights = model / "model.safetensors"
    times = weights.stat()
    first = pipeline("run", "--json", *tiny_job(model=model), cwd=tmp_path)
    data = bytearray(weights.read_bytes())
    data[-64:] = bytes(64)
    weights.write_bytes(data)
    import os

    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    second = pipeline("run", "--json", *tiny_job(model=model), cwd=tmp_path)

    one, two = first.document["stages"], second.document["stages"]
    assert one[0]["artefact"] != two[0]["artefact"]
    assert one[1]["artefact"] != two[1]["artefact"]


def test_candidate_as_its_own_baseline_is_invalid_and_emits_nothing(tmp_path: Path) -> None:
    """bf16 from a bf16 source without another witness: the unquantized conversion is the candidate itself."""
    ended = pipeline("run", "--json", *tiny_job("precision=bf16", "gate.baseline=unquantized"), cwd=tmp_path)

    assert ended.code == 4
    assert "the baseline is the candidate itself" in ended.document["error"]["message"]
    assert not (tmp_path / "dist").exists()
    reports = list((tmp_path / ".pipeline").rglob("report.html"))
    assert reports and "the baseline is the candidate itself" in reports[0].read_text()


def test_interrupted_run_says_130_and_terminated_143(tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(*tiny_job(), cwd=tmp_path / str(code)) if (tmp_path / str(code)).mkdir() is None else None
        assert process is not None and process.stderr is not None
        for line in process.stderr:
            if "start" in line:
                process.send_signal(number)
                break
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr


def test_a_full_disk_ends_with_a_store_error_and_a_valid_store(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk where no small file system can be mounted: writes fail alike."""
    script = "import resource,sys,runpy; resource.setrlimit(resource.RLIMIT_FSIZE,(200000,200000)); "
    script += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    script += "sys.argv=['pipeline',*sys.argv[1:]]; runpy.run_module('pipeline', run_name='__main__')"
    import sys

    done = subprocess.run(
        [sys.executable, "-c", script, *tiny_job()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert pipeline("store", "verify", cwd=tmp_path).code == 0
    assert pipeline(*tiny_job(), cwd=tmp_path).code == 0
