"""Save one tiny llama in every layout of `torch.save`, and as safetensors. Run in an environment with torch 2.13:

python make_torch_files.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "torch"
HIDDEN, WIDTH, VOCAB = 16, 24, 19
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tensors() -> dict[str, torch.Tensor]:
    """Return random weights; two of them share a storage, as fused tensors that were split do."""
    torch.manual_seed(3)
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{at}mlp.gate_proj.weight": (WIDTH, HIDDEN),
        f"{at}mlp.up_proj.weight": (WIDTH, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, WIDTH),
        f"{at}input_layernorm.weight": (HIDDEN,),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    made = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    fused = torch.randn(2 * HIDDEN, HIDDEN).to(torch.bfloat16)
    made[f"{at}self_attn.k_proj.weight"], made[f"{at}self_attn.v_proj.weight"] = fused[:HIDDEN], fused[HIDDEN:]
    return made


def main() -> None:
    """Write one folder per layout."""
    weights = tensors()
    names = sorted(weights)
    for layout in ("safetensors", "zip", "stream", "sharded"):
        folder = HERE / layout
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG) + "\n")
        target = folder / "pytorch_model.bin"
        if layout == "safetensors":
            save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
        elif layout == "zip":
            torch.save(weights, target)
        elif layout == "stream":
            parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
            torch.save(parameters, target, _use_new_zipfile_serialization=False)
        else:
            files = {}
            for i in range(2):
                file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
                torch.save({name: weights[name] for name in names[i::2]}, folder / file)
                files.update(dict.fromkeys(names[i::2], file))
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}) + "\n")
    torch.save({"model.embed_tokens.weight": torch.randn(4, 6).t()}, HERE / "transposed.bin")


if __name__ == "__main__":
    main()
