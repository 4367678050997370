"""What has to be known of a model's shape to plan a build: the numbers of its ``config.json``, without weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a decoder-only transformer. Names follow the TensorRT-LLM checkpoint, values the Hugging Face config.

    Attributes:
        architecture: Class name in ``architectures[0]``, ``LlamaForCausalLM``.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads; equal to ``num_heads`` without grouped attention.
        head_size: Width of a head; not always ``hidden_size / num_heads``.
        intermediate_size: Width of the MLP (of one expert, for mixtures of experts).
        vocab_size: Rows of the embedding, without padding.
        max_position_embeddings: Context the model was trained for, in tokens.
        tie_word_embeddings: The head reuses the embedding matrix.
        gated_mlp: Three matrices per MLP (gate, up, down) instead of two.
        num_experts: 0 for dense models.
        experts_per_token: Experts that run for one token; 0 for dense models.
        rope_scaling_factor: Factor by which rotary scaling stretches ``max_position_embeddings``; 1 for none and for
            kinds that already are in ``max_position_embeddings`` (llama3, longrope, su).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    rope_scaling_factor: float = 1.0

    @property
    def context(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.max_position_embeddings * self.rope_scaling_factor)
