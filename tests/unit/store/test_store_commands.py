from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.store import commands, inspect
from pipeline.store.keys import KeyDocument
from pipeline.store.store import Hit, Store


def publish(store: Store, stage: str, text: str, inputs: dict[str, Hit]) -> Hit:
    document = KeyDocument(stage, 1, {"text": text}, {name: hit.record.key for name, hit in inputs.items()})
    records = {name: hit.record for name, hit in inputs.items()}
    with store.session(), store.staging() as folder:
        (folder / "x").write_text(text)
        hit = store.publish(folder, document, job="job", inputs=records, facts={"n": 1}, versions={}, seconds=1.5)
        store.note_use("job", stage, hit.record.key)
    return hit


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    old = publish(store, "fetch", "old", {})
    publish(store, "convert", "old out", {"fetch": old})
    new = publish(store, "fetch", "new", {})
    publish(store, "convert", "new out", {"fetch": new})
    return store


def command(store: Store, *argv: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    commands.add_arguments(parser)
    out = io.StringIO()
    code = commands.main(parser.parse_args(["--root", str(store.root), *argv]), out)
    return code, out.getvalue()


def test_ls_lists_every_result_once(store: Store) -> None:
    code, text = command(store, "--json", "ls")
    rows = json.loads(text)["records"]
    assert code == 0
    assert sorted((row["stage"], bool(row["used_by"])) for row in rows) == [
        ("convert", False), ("convert", True), ("fetch", False), ("fetch", True),
    ]  # fmt: skip
    assert len(command(store, "ls")[1].splitlines()) == 5


def test_show_takes_digits_or_job_and_stage(store: Store) -> None:
    record = store.latest("job", "convert")
    assert record
    by_name = json.loads(command(store, "--json", "show", "job/convert")[1])
    assert by_name == json.loads(command(store, "--json", "show", record.key[:16])[1])
    assert (by_name["artefact"], by_name["facts"], by_name["seconds"]) == (record.artefact, {"n": 1}, 1.5)
    assert f"key: {record.key}" in command(store, "show", "job/convert")[1]
    with pytest.raises(StoreError, match="no record fits 'zzz'"):
        command(store, "show", "zzz")
    with pytest.raises(StoreError, match="4 records fit"):
        command(store, "show", "")


def test_why_compares_two_results(store: Store) -> None:
    old = next(r for r in inspect.records(store) if r.document.identity == {"text": "old"})
    assert "text: old → new" in command(store, "why", "job/fetch", old.key)[1]
    assert json.loads(command(store, "--json", "why", "job/fetch", old.key)[1])["reason"] == "text: old → new"


def test_verify_fails_until_damage_is_removed(store: Store) -> None:
    assert command(store, "verify") == (0, "every record and every byte is as it was written\n")
    record = store.latest("job", "fetch")
    assert record
    file = store.artefacts / record.artefact / "x"
    file.chmod(0o644)
    file.write_text("neW")
    code, text = command(store, "verify")
    assert code == 6
    assert "1 damaged" in text
    assert command(store, "verify", "--remove")[0] == 0
    assert not file.exists()


def test_gc_keeps_what_the_last_run_needs(store: Store) -> None:
    before = {r.key for r in inspect.records(store)}
    assert json.loads(command(store, "--json", "gc")[1])["removed"] is False
    assert {r.key for r in inspect.records(store)} == before
    (store.actions / ".left.tmp").touch()
    code, text = command(store, "gc", "--yes")
    assert code == 0
    # two artefacts, and each of their two records under two keys
    assert "7 removed" in text
    assert {r.document.identity["text"] for r in inspect.records(store)} == {"new", "new out"}
    assert len(list(store.artefacts.iterdir())) == 2
    assert inspect.verify(store) == []
    assert not (store.actions / ".left.tmp").exists()
    assert command(store, "gc")[1] == "nothing to remove\n"


def test_gc_keeps_off_while_a_run_is_going_on(store: Store) -> None:
    with store.session(), pytest.raises(StoreError, match="in use by a run"):
        command(store, "gc", "--yes")


def test_du_counts_shared_files_once(store: Store) -> None:
    document = json.loads(command(store, "--json", "du")[1])
    assert sorted(document["artefacts"].values()) == [3, 3, 7, 7]
    assert "in all" in command(store, "du")[1]


def test_commands_name_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        command(Store(tmp_path / "nowhere"), "ls")
    assert not (tmp_path / "nowhere").exists()


def test_root_may_stand_on_either_side_of_the_command(store: Store, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    for argv in (["--root", "x", "ls"], ["ls", "--root", "x"], ["--root", "y", "show", "--root", "x", "k"]):
        assert parser.parse_args(argv).root == Path("x")
    assert parser.parse_args(["ls"]).root == Path(commands.DEFAULT_ROOT)


def test_things_that_do_not_belong_into_a_store_stop_nothing(store: Store) -> None:
    before = {record.key for record in inspect.records(store)}
    for folder in ("artefacts", "actions", "staging", "locks", "logs", "latest"):
        (store.root / folder / "junk").touch()
    (store.actions / "junk.json").touch()
    (store.actions / "d.json").mkdir()
    (store.actions / "d.json" / "x").touch()
    (store.root / "staging" / "d.lock").mkdir()
    (store.root / "latest" / "job" / "fetch").write_bytes(b"\xff\xfe")
    (store.root / "latest" / "job" / "dir").mkdir()
    (store.artefacts / "link").symlink_to("/etc")
    assert {record.key for record in inspect.records(store)} == before
    for argv in (["ls"], ["du"], ["gc"]):
        assert command(store, *argv)[0] == 0
    assert command(store, "verify")[0] == 6
    hit = publish(store, "build", "text", {})
    assert isinstance(store.lookup(hit.record.key), Hit)
    assert not (store.root / "staging" / "junk").exists()
    assert command(store, "verify", "--remove")[0] == 0
    assert command(store, "verify")[0] == 0
    assert not (store.actions / "d.json").exists()
    assert not (store.artefacts / "link").is_symlink()
    assert Path("/etc").is_dir()
    assert command(store, "gc", "--yes")[0] == 0
    assert isinstance(store.lookup(hit.record.key), Hit)


def test_damaged_pointer_costs_an_explanation_only(store: Store) -> None:
    (store.root / "latest" / "job" / "fetch").write_bytes(b"\xff\xfe")
    assert store.latest("job", "fetch") is None
    key = inspect.records(store)[0].key
    store.note_use("job", "fetch", key)
    assert ("job", "fetch", key) in list(store.in_use())
