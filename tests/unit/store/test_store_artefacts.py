"""What is published, under which name, and what is found again."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ExitCode, StoreError
from pipeline.store import files
from pipeline.store.digest import list_tree, tree_digest
from pipeline.store.explain import explain
from pipeline.store.faults import store_error
from pipeline.store.inspect import verify
from pipeline.store.keys import KeyDocument, action_key, canonical_json, content_key
from pipeline.store.record import Record, contents
from pipeline.store.store import Hit, Miss, Store

DOCUMENT = KeyDocument("convert", 1, {"precision": {"dtype": "float16"}, "tp": 1}, {"fetch": "0" * 64})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def publish(
    store: Store,
    document: KeyDocument,
    content: Mapping[str, str],
    *,
    job: str = "job",
    inputs: Mapping[str, Record] | None = None,
    write: Callable[[Path], None] | None = None,
) -> Hit:
    with store.session(), store.staging() as folder:
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        if write:
            write(folder)
        hit = store.publish(folder, document, job=job, inputs=inputs or {}, facts={}, versions={}, seconds=1.0)
        store.note_use(job, document.stage, hit.record.key)
    return hit


def test_store_gives_back_what_was_published(store: Store) -> None:
    hit = publish(store, DOCUMENT, {"a.txt": "alpha", "deep/b.txt": "beta"})
    found = store.lookup(action_key(DOCUMENT))
    assert isinstance(found, Hit)
    assert found.record == hit.record
    assert found.path == store.root / "artefacts" / found.record.artefact
    assert (found.path / "deep" / "b.txt").read_text() == "beta"
    assert found.record.size_bytes == len("alpha" + "beta")


def test_artefact_is_read_only_and_keeps_empty_folders(store: Store) -> None:
    # Triton wants an empty version folder in an ensemble.
    hit = publish(store, DOCUMENT, {"run.sh": "x"}, write=lambda p: ((p / "1").mkdir(), (p / "run.sh").chmod(0o755)))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [hit.path, *hit.path.rglob("*")]}
    assert modes == {hit.path.name: 0o555, "1": 0o555, "run.sh": 0o555}


def test_artefact_refuses_links_and_special_files(store: Store) -> None:
    for make in (lambda p: (p / "x").symlink_to("/etc/passwd"), lambda p: os.mkfifo(p / "x")):
        with pytest.raises(StoreError, match=r"x is a (symbolic link|special file)"):
            publish(store, DOCUMENT, {}, write=make)
    assert isinstance(store.lookup(action_key(DOCUMENT)), Miss)


def test_staging_is_removed_after_a_failure(store: Store) -> None:
    with pytest.raises(RuntimeError), store.session(), store.staging() as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list((store.root / "staging").iterdir()) == []


def test_session_sweeps_stagings_of_dead_processes_only(store: Store) -> None:
    with store.session():
        dead = store.root / "staging" / "dead"
        (dead / "deep").mkdir(parents=True)
        (dead / "deep").chmod(0o555)
        (store.root / "staging" / "dead.lock").touch()
        with store.staging() as alive:
            code = f"""
from pathlib import Path
from pipeline.store.store import Store
with Store(Path({str(store.root)!r})).session():
    pass
"""
            subprocess.run([sys.executable, "-c", code], check=True)
            assert alive.is_dir()
    assert not dead.exists()
    assert list((store.root / "staging").iterdir()) == []


def test_equal_content_is_stored_once(store: Store) -> None:
    first = publish(store, DOCUMENT, {"a": "same"})
    second = publish(store, replace(DOCUMENT, version=2), {"a": "same"})
    assert first.path == second.path
    assert len(list(store.artefacts.iterdir())) == 1


DIGEST_SCRIPT = """
import sys
from pathlib import Path
from pipeline.store.digest import list_tree, tree_digest
from pipeline.store.keys import KeyDocument, action_key
root = Path(sys.argv[1])
names = ["b/two", "a/one", "c", "a/three"]
for name in reversed(names) if sys.argv[2] == "reversed" else names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(name.encode() * 100)
identity = {name: {"flags": sorted({"x", "y"}), "size": 1.5} for name in set(names)}
print(tree_digest(list_tree(root)), action_key(KeyDocument("s", 1, identity, {n: n for n in set(names)})))
"""


def test_digests_and_keys_do_not_depend_on_folder_order_hash_seed_or_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for seed, order in (("0", "given"), ("1", "reversed"), ("12345", "given")):
        root = tmp_path / f"folder-{seed}"
        root.mkdir()
        env = {**os.environ, "PYTHONHASHSEED": seed}
        argv = [sys.executable, "-c", DIGEST_SCRIPT, str(root), order]
        seen.add(subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout)
    assert len(seen) == 1
    for threads in (1, 2, 8):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        assert tree_digest(list_tree(tmp_path / "folder-0")) == next(iter(seen)).split()[0]


def test_digest_covers_names_content_and_the_executable_bit_but_no_times(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = tree_digest(list_tree(tmp_path))
    os.utime(tmp_path / "a", (1, 1))
    assert tree_digest(list_tree(tmp_path)) == before
    (tmp_path / "a").chmod(0o755)
    executable = tree_digest(list_tree(tmp_path))
    (tmp_path / "a").chmod(0o644)
    (tmp_path / "a").write_text("y")
    other = tree_digest(list_tree(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({before, executable, other, tree_digest(list_tree(tmp_path))}) == 4


def test_keys_cover_each_part() -> None:
    variants = [
        DOCUMENT,
        replace(DOCUMENT, stage="build"),
        replace(DOCUMENT, version=2),
        replace(DOCUMENT, identity={}),
        replace(DOCUMENT, inputs={"fetch": "1" * 64}),
        replace(DOCUMENT, inputs={}),
    ]
    keys = {action_key(v) for v in variants} | {content_key(v, v.inputs) for v in variants}
    assert len(keys) == 2 * len(variants)


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {2: 3}}, {"a": Path("x")}, {"a": {1, 2}}], ids=repr)
def test_canonical_json_coerces_nothing(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_keys_refuse_secrets() -> None:
    with pytest.raises(StoreError, match="identity of stage convert holds a secret"):
        action_key(replace(DOCUMENT, identity={"url": "https://me:passw0rd@example.org"}))


def test_facts_are_recorded_without_secrets(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_TESTSECRET123")
    with store.session(), store.staging() as folder:
        (folder / "x").touch()
        facts = {
            "header": "Bearer hf_TESTSECRET123",
            "ppl": float("nan"),
            "path": Path("/x"),
            "n": (1, 2.5, True, None),
        }
        store.publish(folder, DOCUMENT, job="job", inputs={}, facts=facts, versions={}, seconds=0)
    found = store.lookup(action_key(DOCUMENT))
    assert isinstance(found, Hit)
    assert found.record.facts == {"header": "Bearer ***", "ppl": "nan", "path": "/x", "n": [1, 2.5, True, None]}
    assert not [p for p in store.root.rglob("*") if p.is_file() and b"TESTSECRET" in p.read_bytes()]


def damage_truncate(path: Path) -> None:
    path.chmod(0o644)
    path.write_text("alp")


def damage_remove(path: Path) -> None:
    path.parent.chmod(0o755)
    path.unlink()


def damage_add(path: Path) -> None:
    path.parent.chmod(0o755)
    (path.parent / "extra").touch()


def damage_folder(path: Path) -> None:
    files.remove_tree(path.parent)


@pytest.mark.parametrize("hurt", [damage_truncate, damage_remove, damage_add, damage_folder])
def test_damaged_artefact_is_a_miss_with_a_reason_and_can_be_built_again(
    store: Store, hurt: Callable[[Path], None]
) -> None:
    hit = publish(store, DOCUMENT, {"a.txt": "alpha"})
    hurt(hit.path / "a.txt")
    found = store.lookup(hit.record.key)
    assert isinstance(found, Miss)
    assert found.reason.startswith("artefact damaged: ")
    assert explain(store, "job", DOCUMENT) == found.reason
    assert verify(store)
    again = publish(store, DOCUMENT, {"a.txt": "alpha"})
    assert again.path == hit.path
    assert (again.path / "a.txt").read_text() == "alpha"
    assert verify(store) == []


@pytest.mark.parametrize("keep", [0, 1, 200, -3], ids=["empty", "one byte", "half", "end missing"])
def test_truncated_record_is_a_miss_with_a_reason(store: Store, keep: int) -> None:
    hit = publish(store, DOCUMENT, {"a": "x"})
    path = store.actions / f"{hit.record.key}.json"
    path.write_bytes(path.read_bytes()[:keep])
    found = store.lookup(hit.record.key)
    assert isinstance(found, Miss)
    assert found.reason.startswith("record damaged: ")


def test_changed_record_is_a_miss(store: Store) -> None:
    hit = publish(store, DOCUMENT, {"a": "x"})
    path = store.actions / f"{hit.record.key}.json"
    content = json.loads(path.read_bytes())
    content["body"]["seconds"] = 2.0
    path.write_text(json.dumps(content))
    found = store.lookup(hit.record.key)
    assert isinstance(found, Miss) and "checksum" in found.reason


def test_verify_finds_changed_bytes_of_equal_size(store: Store) -> None:
    hit = publish(store, DOCUMENT, {"a": "alpha"})
    (hit.path / "a").chmod(0o644)
    (hit.path / "a").write_text("alphb")
    (hit.path / "a").chmod(0o444)
    assert isinstance(store.lookup(hit.record.key), Hit)
    assert [problem.artefact for problem in verify(store)] == [hit.path.name]


def test_hit_takes_milliseconds_whatever_the_size(store: Store) -> None:
    def big(folder: Path) -> None:
        with (folder / "weights").open("wb") as file:
            file.truncate(200 << 20)

    hit = publish(store, DOCUMENT, {}, write=big)
    started = time.perf_counter()
    assert isinstance(store.lookup(hit.record.key), Hit)
    # Hashing the file takes 100 ms at least; 0.3 ms were measured for the look-up.
    assert time.perf_counter() - started < 0.05


def test_unchanged_links_into_inputs_are_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish(store, DOCUMENT, {"weights": "w" * 1000})
    read: list[str] = []
    from pipeline.store import digest

    original = digest.hash_file
    monkeypatch.setattr(digest, "hash_file", lambda p, sync=False: (read.append(p.name), original(p, sync=sync))[1])
    document = KeyDocument("build", 1, {}, {"convert": first.record.key})
    second = publish(
        store,
        document,
        {"config": "c"},
        inputs={"convert": first.record},
        write=lambda folder: files.link_or_copy(first.path / "weights", folder / "weights"),
    )
    assert read == ["config"]
    assert (second.path / "weights").samefile(first.path / "weights")
    assert verify(store) == []


def test_link_or_copy_copies_what_is_not_in_the_store(tmp_path: Path) -> None:
    source = tmp_path / "user-file"
    source.write_text("mine")
    source.chmod(0o444)
    files.link_or_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").samefile(source)
    assert (tmp_path / "copy").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o644


def test_equal_inputs_made_otherwise_find_the_result_by_content(store: Store) -> None:
    fetch = publish(store, KeyDocument("fetch", 1, {}, {}), {"model": "m"})
    convert = KeyDocument("convert", 1, {}, {"fetch": fetch.record.key})
    made = publish(store, convert, {"out": "o"}, inputs={"fetch": fetch.record})
    again = publish(store, KeyDocument("fetch", 2, {}, {}), {"model": "m"})
    wanted = KeyDocument("convert", 1, {}, {"fetch": again.record.key})
    assert isinstance(store.lookup(action_key(wanted)), Miss)
    found = store.lookup(content_key(wanted, contents({"fetch": again.record})))
    assert isinstance(found, Hit)
    with store.session():
        store.adopt(found, wanted, {"fetch": again.record})
    adopted = store.lookup(action_key(wanted))
    assert isinstance(adopted, Hit)
    assert (adopted.path, adopted.record.document) == (made.path, wanted)


def test_explain_names_what_changed(store: Store) -> None:
    assert explain(store, "job", DOCUMENT) == "never built"
    publish(store, DOCUMENT, {"a": "x"})
    wanted = replace(DOCUMENT, identity={"precision": {"dtype": "bfloat16"}, "tp": 1})
    assert explain(store, "job", wanted) == "precision.dtype: float16 → bfloat16"
    assert explain(store, "job", replace(DOCUMENT, version=2)) == "stage version 1 → 2"
    assert explain(store, "job", replace(DOCUMENT, inputs={"fetch": "1" * 64})) == "input fetch changed"
    assert explain(store, "other job", wanted) == "never built"
    many = replace(DOCUMENT, version=2, identity={"a": 1, "b": None, "tp": "1"})
    assert explain(store, "job", many) == "stage version 1 → 2, a: nothing → 1, b: nothing → None, and 2 more"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "ä ö", "x=1,y"])
def test_any_job_name_is_safe(store: Store, name: str) -> None:
    hit = publish(store, DOCUMENT, {"a": "x"}, job=name)
    assert list(store.in_use()) == [(name, "convert", hit.record.key)]
    assert store.latest(name, "convert") == hit.record
    assert {p.name for p in store.root.iterdir()} == {
        ".lock", "artefacts", "actions", "latest", "staging", "locks", "logs",
    }  # fmt: skip


def test_store_that_cannot_be_made_or_written_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory") as caught, Store(tmp_path / "file" / "store").session():
        pass
    assert caught.value.exit_code == ExitCode.STORE


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_store_without_write_access_serves_hits_and_refuses_work(tmp_path: Path) -> None:
    root = tmp_path / "store"
    hit = publish(Store(root), DOCUMENT, {"a": "x"})
    code = f"""
import encodings.ascii, os
from pathlib import Path
from pipeline.errors import StoreError
from pipeline.store.store import Hit, Store
store = Store(Path({str(root)!r}))
os.setuid(65534)
with store.session():
    assert isinstance(store.lookup({hit.record.key!r}), Hit)
    store.note_use("other", "convert", {hit.record.key!r})
    try:
        with store.staging():
            raise SystemExit("staging in a store of another user")
    except StoreError as error:
        print(error, "|", error.hint)
"""
    for folder in [tmp_path, *tmp_path.parents[:-2]]:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Permission denied" in done.stdout
    assert "store.root" in done.stdout


def test_ordinary_users_can_publish_and_remove(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("every other test is this one")
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:-2]:
        if folder.stat().st_uid == 0:
            folder.chmod(folder.stat().st_mode | 0o055)
    code = f"""
import encodings.ascii, os  # what is loaded later may be out of the other user's reach
from pathlib import Path
from pipeline.store import inspect
from pipeline.store.keys import KeyDocument
from pipeline.store.store import Store
os.setuid(65534)
store = Store(Path({str(tmp_path)!r}) / "store")
about = dict(job="j", inputs={{}}, facts={{}}, versions={{}}, seconds=0)
for version in (1, 2):
    with store.session(), store.staging() as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "x").write_text(str(version))
        hit = store.publish(folder, KeyDocument("s", version, {{}}, {{}}), **about)
        store.note_use("j", "s", hit.record.key)
assert inspect.collect(store).freed_bytes > 0
assert inspect.verify(store) == []
assert len(list(store.artefacts.iterdir())) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_full_disk_names_what_was_written_not_what_was_read(tmp_path: Path) -> None:
    error = OSError(28, "No space left on device", "/src/read", None, str(tmp_path / "written"))
    assert f"cannot write {tmp_path}/written: No space left" in store_error(error, tmp_path).message


def test_copy_tree_leaves_permissions_behind(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "x").write_text("1")
    (source / "run").touch(mode=0o755)
    files.make_read_only(source)
    source.chmod(0o555)
    (tmp_path / "target").mkdir()
    files.copy_tree(source, tmp_path / "target")
    target = tmp_path / "target"
    modes = {path.relative_to(target).as_posix(): path.stat().st_mode & 0o700 for path in target.rglob("*")}
    assert modes == {"deep": 0o700, "deep/empty": 0o700, "deep/x": 0o600, "run": 0o700}
    assert target.stat().st_mode & 0o200
