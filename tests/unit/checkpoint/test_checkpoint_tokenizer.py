"""Tokenizers: rebuilt from GGUF metadata, copied from a folder, converted from SentencePiece."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_models import tiny_gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipeline.checkpoint import write_tokenizer
from pipeline.checkpoint.tokenizer.sentencepiece_bpe import ranked_merges
from pipeline.checkpoint.tokenizer.sentencepiece_model import parse_sentencepiece
from pipeline.errors import SourceError
from pipeline.gate.protocol import shipped_text

DATA = Path(__file__).parents[2] / "data" / "checkpoint"


def sentencepiece_folder(folder: Path, name: str, **config: Any) -> Path:
    """Make a source folder with a tokenizer.model alone."""
    folder.mkdir()
    shutil.copy(DATA / f"{name}.model", folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["spm_bpe", "spm_nodummy"])
def test_sentencepiece_bpe_gives_the_ids_of_the_sentencepiece_package(tmp_path: Path, name: str) -> None:
    report = write_tokenizer(sentencepiece_folder(tmp_path / "m", name), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    # Recorded from sentencepiece 0.2.3 by make_spm_expected.py.
    for line in (DATA / f"{name}.jsonl").read_text().splitlines():
        expected = json.loads(line)
        assert tokenizer.encode(expected["text"], add_special_tokens=False).ids == expected["ids"], expected["text"]
        assert tokenizer.decode(expected["ids"]) == expected["text"].replace("\u2581", " ")
    assert (report.kind, report.bos_token_id, report.eos_token_ids) == ("sentencepiece", 1, (2,))


def test_sentencepiece_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    for name, config, ids in (("a", {"x": 1}, [1]), ("b", {"add_bos_token": False, "add_eos_token": True}, [2])):
        write_tokenizer(sentencepiece_folder(tmp_path / name, "spm_bpe", **config), tmp_path / f"{name}-out")
        assert Tokenizer.from_file(str(tmp_path / f"{name}-out" / "tokenizer.json")).encode("").ids == ids


def test_sentencepiece_keeps_tokens_added_later_and_special_tokens_in_text(tmp_path: Path) -> None:
    source = sentencepiece_folder(tmp_path / "m", "spm_bpe")
    (source / "added_tokens.json").write_text(json.dumps({"<pad>": 700}))
    write_tokenizer(source, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("</s><pad>", add_special_tokens=False).ids == [2, 700]
    (source / "added_tokens.json").write_text(json.dumps({"<pad>": 705}))
    with pytest.raises(SourceError, match="'<pad>' would get id 700; expected 705"):
        write_tokenizer(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [("spm_unigram", {}, "model type unigram"), ("spm_bpe", {"legacy": False}, "legacy: false")],
)
def test_sentencepiece_variant_without_exact_form_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SourceError, match=f"cannot be converted exactly: {reason}") as caught:
        write_tokenizer(sentencepiece_folder(tmp_path / "m", name, **config), tmp_path / "out")
    assert "tokenizer.json" in caught.value.hint
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("cut", [0, 40, 5000])
def test_sentencepiece_file_that_is_damaged_is_named(tmp_path: Path, cut: int) -> None:
    source = sentencepiece_folder(tmp_path / "m", "spm_bpe")
    file = source / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:cut] + (b"\xff" * 9 if cut else b""))
    with pytest.raises(SourceError, match=r"tokenizer\.model"):
        write_tokenizer(source, tmp_path / "out")


def test_merges_of_a_repeating_piece_prefer_the_left_pair() -> None:
    # "ababa" repeats with period 2: in ab·aba·ba both pairs give it, and SentencePiece joins the left one.
    pieces = {text: (i, -float(i)) for i, text in enumerate(["a", "b", "ba", "ab", "aba", "ababa"])}
    merges, doubtful = ranked_merges(pieces)
    assert [merge for merge in merges if "".join(merge) == "ababa"] == [("ab", "aba"), ("aba", "ba")]
    assert doubtful == []
    runs, doubtful = ranked_merges({"-": (0, 0.0), "--": (1, -1.0), "---": (2, -2.0)})
    assert doubtful == ["---"]
    assert len(runs) == 3


def test_sentencepiece_parser_reads_what_the_trainer_was_told() -> None:
    model = parse_sentencepiece(DATA / "spm_nodummy.model")
    assert (len(model.pieces), model.model_type, model.byte_fallback, model.add_dummy_prefix) == (900, 2, True, False)
    assert [piece.text for piece in model.pieces[:5]] == ["<unk>", "<s>", "</s>", "<turn>", "\n\n"]


def test_gguf_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    report = write_tokenizer(tiny_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    # "12" is in the vocabulary with a merge: only the digit rule keeps it apart.
    assert tokenizer.encode("ab 12<|end|>").tokens == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12 é").ids) == "ab 12 é"
    assert (report.eos_token_ids, report.bos_token_id) == ((1,), 0)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert (config["eos_token"], config["tokenizer_class"]) == ("<|end|>", "PreTrainedTokenizerFast")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [1]


def test_gguf_with_all_end_tokens_lists_them(tmp_path: Path) -> None:
    report = write_tokenizer(tiny_gguf(tmp_path / "m.gguf", eot=0), tmp_path / "out")
    assert report.eos_token_ids == (1, 0)


@pytest.mark.parametrize(("pre", "model"), [("qwen2", "gpt2"), ("default", "gpt2"), ("smollm", "llama")])
def test_gguf_tokenizer_of_an_unknown_kind_is_refused_by_name(tmp_path: Path, pre: str, model: str) -> None:
    source = tiny_gguf(tmp_path / "m.gguf", pre=pre, tokenizer_model=model)
    with pytest.raises(SourceError, match=f"'{pre if model == 'gpt2' else model}'"):
        write_tokenizer(source, tmp_path / "out")


def hf_folder(folder: Path, **files: Any) -> Path:
    """Make a source folder with a word-level tokenizer and JSON files."""
    folder.mkdir()
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|eot|>": 3, "hi": 4}
    Tokenizer(WordLevel(vocabulary, "<unk>")).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("generation", "model", "eos"),
    [
        ({"eos_token_id": [3, 2]}, {}, (3, 2)),
        ({"eos_token_id": 3}, {"eos_token_id": 9}, (3, 2)),
        (None, {"eos_token_id": 3}, (3, 2)),
        ({"temperature": 0.5}, {}, (2,)),
    ],
)
def test_folder_unites_the_end_tokens_of_generation_config_and_tokenizer(
    tmp_path: Path, generation: dict[str, Any] | None, model: dict[str, Any], eos: tuple[int, ...]
) -> None:
    files: dict[str, Any] = {"tokenizer_config": {"eos_token": {"content": "</s>"}}, "config": model}
    if generation is not None:
        files["generation_config"] = generation
    report = write_tokenizer(hf_folder(tmp_path / "m", **files), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert report.eos_token_ids == eos == tuple(written["eos_token_id"])
    assert written.get("temperature") == (generation or {}).get("temperature")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", None])
def test_folder_packs_the_chat_template_from_wherever_it_is(tmp_path: Path, place: str | None) -> None:
    config = {"chat_template": "{{ x }}"} if place == "tokenizer_config.json" else {}
    source = hf_folder(tmp_path / "m", tokenizer_config=config)
    if place and place != "tokenizer_config.json":
        (source / place).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (source / "model.safetensors").write_bytes(b"not for serving")
    report = write_tokenizer(source, tmp_path / "out")
    assert report.chat_template == place
    assert bool([w for w in report.warnings if "chat template" in w]) == (place is None)
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()} == set(
        report.files
    )
    assert "model.safetensors" not in report.files


def test_folder_copies_links_as_real_files(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "m")
    (source / "tokenizer.json").rename(tmp_path / "blob")
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    write_tokenizer(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"vocab_size": 5, "eos_token_id": "x"}}, r"config\.json: eos_token_id is 'x'; expected 0 to 4"),
        ({"config": {"vocab_size": 5}, "generation_config": {"eos_token_id": [2, 5]}}, r"eos_token_id is 5"),
        ({"config": {"vocab_size": 5, "bos_token_id": 99}}, "bos_token_id is 99"),
        ({"config": {"eos_token_id": True}}, "eos_token_id is True; expected an id"),
        (
            {"config": {"vocab_size": 3}, "tokenizer_config": {"eos_token": "<|eot|>"}},
            "ends a text with id 3, the model knows ids up to 2",
        ),
    ],
)
def test_folder_refuses_ids_that_no_text_ends_with(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        write_tokenizer(hf_folder(tmp_path / "m", **files), tmp_path / "out")


def test_folder_takes_minus_one_as_no_id(tmp_path: Path) -> None:
    files = {"config": {"vocab_size": 5, "eos_token_id": -1}, "tokenizer_config": {"eos_token": "</s>"}}
    assert write_tokenizer(hf_folder(tmp_path / "m", **files), tmp_path / "out").eos_token_ids == (2,)


def test_folder_warns_of_tokens_the_model_has_no_row_for(tmp_path: Path) -> None:
    report = write_tokenizer(hf_folder(tmp_path / "m", config={"vocab_size": 4}), tmp_path / "out")
    assert any("ids up to 4, the model has 4" in warning for warning in report.warnings)


def test_folder_with_a_damaged_or_foreign_tokenizer_is_named(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "m", tokenizer_config={"eos_token": "<eos>"})
    with pytest.raises(SourceError, match=r"eos_token '<eos>' is not in tokenizer\.json"):
        write_tokenizer(source, tmp_path / "a")
    (source / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match="Git-LFS pointer"):
        write_tokenizer(source, tmp_path / "b")
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="cannot be read as a tokenizer"):
        write_tokenizer(source, tmp_path / "c")
    (source / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="no tokenizer"):
        write_tokenizer(source, tmp_path / "d")


def test_smollm2_tokenizer_cuts_as_the_published_one(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Expected: the published tokenizer; the counts and ids are transformers', tests/data/smollm2_generation.json."""
    write_tokenizer(smollm2_gguf, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    tokens = ["In", "Ġ", "1", "2", "3", "4", "5", "Ġand", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("In 12345 and 2024").tokens == tokens
    assert len(tokenizer.encode(shipped_text()).ids) == 48577
    golden = json.loads((Path(__file__).parents[2] / "data" / "smollm2_generation.json").read_text())
    for case in golden["cases"]:
        if case["kind"] != "chat":
            assert tokenizer.encode(case["text"]).ids == case["prompt_ids"]
