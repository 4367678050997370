"""Record what the sentencepiece package (0.2.3) gives for some texts. Run in an environment that has it:

    python make_spm_expected.py

The models were trained by the same package on English text: `spm_bpe` and `spm_nodummy` are BPE with byte fallback, the
second without leading space and with the user-defined symbols `<turn>` and two newlines; `spm_unigram` cannot be
converted.
"""

import json
import random
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
TEXTS = [
    "",
    " ",
    "a",
    " leading and trailing ",
    "  two  spaces   three",
    "The quick brown fox, 1234567890 times; isn't it?",
    "line\none\n\nline two\t\ttab\n\n\n\nend",
    "日本語と한국어 and 😀👩‍👩‍👧 é e\u0301 ÿ",
    "\u2581marks\u2581 in text",
    "<0x41> is text",
    *(character * count for character in " -=*.a\n" for count in (2, 3, 5, 8, 17)),
]


def random_texts() -> list[str]:
    """Return random strings over an alphabet that makes many ties."""
    rng = random.Random(11)
    return ["".join(rng.choice("abth e-=.\n\té日") for _ in range(rng.randint(1, 40))) for _ in range(150)]


for name in ("spm_bpe", "spm_nodummy"):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{name}.model"))
    texts = [*TEXTS, *random_texts(), "<turn>user\n\nhi<turn>"]
    lines = [json.dumps({"text": text, "ids": processor.encode(text)}, ensure_ascii=True) for text in texts]
    (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
