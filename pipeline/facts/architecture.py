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

    def rank_widths(self, tp: int) -> dict[str, int]:
        """Return the input widths of a rank's matrices by name; scales in groups lie along them."""
        return {
            "hidden size": self.hidden_size,
            "attention output": self.num_heads * self.head_size // tp,
            "MLP width": self.intermediate_size // tp,
        }

    @property
    def parameters(self) -> int:
        """Number of weights; biases and the norms inside attention are not counted (below 0.1 % of any model)."""
        embedding = self.vocab_size * self.hidden_size
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        matrices = 3 if self.gated_mlp else 2
        mlp = matrices * max(1, self.num_experts) * self.hidden_size * self.intermediate_size
        layer = attention + mlp + self.num_experts * self.hidden_size + 2 * self.hidden_size
        tables = embedding if self.tie_word_embeddings else 2 * embedding
        return self.num_layers * layer + tables + self.hidden_size
