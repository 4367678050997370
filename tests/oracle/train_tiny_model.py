"""Train the tiny chat model that the tests build: needs torch and transformers (extra oracle).

    .venv-oracle/bin/python tests/oracle/train_tiny_model.py tests/data/models/tiny-llama

A random model is at chance, and the gate rightly refuses to compare with such a baseline. This one has read the
evaluation text a few times, which makes it useless as a model and good as a test case. Single-threaded and seeded.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).parents[2] / "pipeline/gate/data/eval_en_austen_persuasion_v1.txt"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, BATCH, LENGTH = 500, 16, 128


def main(out: Path) -> None:
    """Write the model folder."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": SPECIAL[2], "bos_token": SPECIAL[0], "add_bos_token": False}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

    ids = torch.tensor(tokenizer.encode(text).ids)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        batch = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.to(torch.bfloat16).save_pretrained(out)


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE with 1024 pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        shutil.rmtree(target)
    main(target)
