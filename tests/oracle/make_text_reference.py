"""Record what transformers makes of tiny tokenizers and chat templates.

    python tests/oracle/make_text_reference.py [--gguf MODEL.gguf]

Needs transformers, tokenizers and (with --gguf) gguf. Writes tests/data/frontend: one folder per tokenizer, text.json
with encodings and decodings, templates.json with rendered conversations. ``--gguf`` adds the template that a GGUF file
carries. The tokenizers are trained once and kept, since training does not repeat exactly (--retrain); with the same
tokenizers a second run writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

OUT = Path(__file__).parent.parent / "data" / "frontend"
MARK = "\N{LOWER ONE EIGHTH BLOCK}"

CORPUS = [
    "The quick brown fox jumps over the lazy dog . It doesn't stop, it 's running !",
    "User: what is the capital of France ? Assistant: the capital of France is Paris.",
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
    "naïve café façade über straße déjà vu",
    "def main():\n    return 'value' # comment\n\tprint( x , y )",
] * 4

TEXTS = [
    "Hello world",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "User: the quick fox\nUser: again",
    "a family 👨‍👩‍👧‍👦 and a flag 🇩🇪!",
    "日本語のテキスト、漢字とかな。",
    "combining e\u0301 o\u0308 n\u0303 and Hangul 한국어",
    "tabs\tand\n\nnewlines\r\n",
    "it 's , fine . don't ! really ? we 're ' ok '",
    "café naïve über",
    "12345 and 2024",
    "عربى עברית हिन्दी ไทย",
    "<tool>added</tool> text <|end|> more",
    "",
]


def bytes_fallback() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace_bpe() -> tuple[Tokenizer, dict]:
    """As Llama 2: sentencepiece BPE with byte fallback, decoder chain ending in Strip."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special + bytes_fallback(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, config | {"legacy": False}


def unigram() -> tuple[Tokenizer, dict]:
    """As T5 or ALBERT: Unigram with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def byte_level() -> tuple[Tokenizer, dict]:
    """As Llama 3 or SmolLM2: byte-level BPE, digits apart, special and plain added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    tokenizer.add_tokens([AddedToken("größe mit leerzeichen"), AddedToken("é")])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|begin|> $A", pair="$A $B", special_tokens=[("<|begin|>", 0)]),
        ]
    )
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return tokenizer, config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def byte_level_clean() -> tuple[Tokenizer, dict]:
    """The same with clean_up_tokenization_spaces, as Llama 3's configuration has it."""
    tokenizer, config = byte_level()
    return tokenizer, config | {"clean_up_tokenization_spaces": True}


def word_piece() -> tuple[Tokenizer, dict]:
    """As BERT: WordPiece with cleanup in the decoder."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=220, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "cls_token": "[CLS]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    return tokenizer, config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def word_suffix() -> tuple[Tokenizer, dict]:
    """As the first GPT or CLIP: BPE with an end-of-word suffix."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer, {"unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}


def pattern() -> tuple[Tokenizer, dict]:
    """A decoder that nobody can follow token by token: Replace with a regular expression."""
    tokenizer, config = metaspace_bpe()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(MARK + "+"), " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def declared() -> tuple[Tokenizer, dict]:
    """tokenizer.json knows nothing of the special tokens; the configuration adds them."""
    tokenizer, _ = byte_level()
    state = json.loads(tokenizer.to_str())
    state["added_tokens"], state["post_processor"] = [], None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken", "lstrip": False, "rstrip": False,
                      "normalized": False, "single_word": False},
        "additional_special_tokens": ["<|new|>"],
        "added_tokens_decoder": {"2": {"content": "<|pad|>", "special": True, "lstrip": False, "rstrip": False,
                                       "normalized": False, "single_word": False}},
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(state)), config


KINDS = [metaspace_bpe, unigram, byte_level, byte_level_clean, word_piece, word_suffix, pattern, declared]


def sequences(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[list[int]]:
    """Return encodings of the texts and seeded random ids, many of them bytes that are no text."""
    size = len(tokenizer)
    found = [tokenizer.encode(text) for text in TEXTS]
    found += [[rng.randrange(size) for _ in range(rng.randrange(1, 24))] for _ in range(40)]
    byte_ids = [tokenizer.convert_tokens_to_ids(token) for token in bytes_fallback()]
    byte_ids = [index for index in byte_ids if index is not None and index != tokenizer.unk_token_id]
    for _ in range(20 if byte_ids else 0):
        found.append([rng.choice(byte_ids) if rng.random() < 0.7 else rng.randrange(size) for _ in range(12)])
    found.append([size + 5, *found[0]])
    return found


def conversations() -> dict[str, dict]:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place <now> & 'later', größer",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    call = {"type": "function", "id": "call_1", "function": {"name": "get_weather", "arguments": {"place": "Köln"}}}

    def say(role: str, content: str, **more: object) -> dict:
        return {"role": role, "content": content, **more}

    closed = {"add_generation_prompt": False}
    answered = [say("user", "Weather?"), say("assistant", "", tool_calls=[call])]
    return {
        "user": {"messages": [say("user", "Hi {{ 7*7 }} {% raise %} \n")]},
        "system": {"messages": [say("system", 'Be <brief> & "kind"'), say("user", "Hé 👋")]},
        "turns": {"messages": [say("user", "a"), say("assistant", " b "), say("user", "c")]},
        "no_prompt": {"messages": [say("user", "a"), say("assistant", "b")], **closed},
        "continued": {
            "messages": [say("user", "a"), say("assistant", "The answer is ")],
            "continue_final_message": True,
            **closed,
        },
        "tools": {"messages": [say("user", "Weather?")], "tools": [tool]},
        "called": {"messages": [*answered, say("tool", "rain", tool_call_id="call_1")], "tools": [tool]},
        "wrong_order": {"messages": [say("assistant", "a")]},
        "variables": {"messages": [say("user", "a")], "variables": {"thinking": True, "bos_token": "[B]"}},
    }


TEMPLATES = {
    "blocks": (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] == 'user' %}\n"
        "[U] {{ message['content'] | trim }} [/U]\n"
        "    {%- elif message['role'] == 'assistant' -%}\n"
        "        {{ ' ' + message['content'] + eos_token }}\n"
        "    {%- else %}\n"
        "<<{{ message.role | upper }}>> {{ message.content }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[A]{% endif %}"
    ),
    "strict": (
        "{%- for message in messages -%}"
        "{%- if loop.first and message.role == 'assistant' -%}"
        "{{ raise_exception('must begin with the user') }}{%- endif -%}"
        "{%- generation -%}{{ '<' + message.role + '>' + message.content }}{%- endgeneration -%}"
        "{%- if thinking is defined and thinking -%}(think){%- endif -%}"
        "{%- endfor -%}"
        "{{ '<assistant>' if add_generation_prompt else '' }}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function.parameters | tojson(indent=2) }}\n"
        "{% endfor %}{% endif %}"
        "{% for message in messages %}{% if message.content == 'c' %}{% break %}{% endif %}"
        "{{ message.role }}: {{ message.content }}"
        "{% if message.tool_calls is defined %}{% for call in message.tool_calls %}"
        "<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>"
        "{% endfor %}{% endif %}\n{% endfor %}"
        "{%- set ns = namespace(n=0) -%}{% for message in messages %}{% set ns.n = ns.n + message.content | length %}"
        "{% endfor %}{{ ns.n }} {{ messages[0].content[::-1] }} {{ messages | map(attribute='role') | join(',') }}"
        "{% if documents %}DOCS{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}


def rendered(tokenizer: PreTrainedTokenizerFast, template: str, case: dict) -> dict:
    """Return the text, or that there is none."""
    options = {key: value for key, value in case.items() if key not in ("messages", "variables")}
    options.setdefault("add_generation_prompt", True)
    try:
        text = tokenizer.apply_chat_template(
            case["messages"], chat_template=template, tokenize=False, **options, **case.get("variables", {})
        )
    except Exception as error:
        return {"error": type(error).__name__}
    return {"text": text}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, config: dict) -> None:
    state = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, indent=0) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="GGUF file whose chat template is recorded too")
    parser.add_argument("--retrain", action="store_true", help="train the tokenizers anew; ids will differ")
    arguments = parser.parse_args()
    rng = random.Random(20)
    made_by = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    text: dict = {"made_by": made_by, "kinds": {}}
    for kind in KINDS:
        folder = OUT / "tokenizers" / kind.__name__
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer.json").is_file() or arguments.retrain:
            write_tokenizer(folder, *kind())
        loaded = AutoTokenizer.from_pretrained(folder)
        text["kinds"][kind.__name__] = {
            "vocab_size": len(loaded),
            "special_tokens": loaded.special_tokens_map,
            "encoded": [
                {"text": entry, "default": loaded.encode(entry), "bare": loaded.encode(entry, add_special_tokens=False)}
                for entry in TEXTS
            ],
            "decoded": [
                {"ids": ids, "text": loaded.decode(ids, skip_special_tokens=True)} for ids in sequences(loaded, rng)
            ],
        }
    (OUT / "text.json").write_text(json.dumps(text, ensure_ascii=False) + "\n")

    sources = dict(TEMPLATES)
    if arguments.gguf:
        from gguf import GGUFReader

        field = GGUFReader(str(arguments.gguf)).fields["tokenizer.chat_template"]
        sources["smollm2"] = bytes(field.parts[field.data[0]]).decode()
    elif (OUT / "templates.json").is_file():
        known = json.loads((OUT / "templates.json").read_text())["sources"]
        sources |= {name: source for name, source in known.items() if name not in sources}
    loaded = AutoTokenizer.from_pretrained(OUT / "tokenizers" / "byte_level")
    cases = [
        {"template": name, "case": label, **case, "expected": rendered(loaded, source, case)}
        for name, source in sources.items()
        for label, case in conversations().items()
    ]
    document = {"made_by": made_by, "special_tokens": loaded.special_tokens_map, "sources": sources, "cases": cases}
    (OUT / "templates.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
