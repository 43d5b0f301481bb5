"""Sizes of the language models that are compared, and what a training step of one computes."""

from dataclasses import dataclass

from normstream import DecoderConfig, preset


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder (RMSNorm, rotary positions, SwiGLU, no biases, head of its own) and its batch.

    >>> SHAPES["small"].matrix_parameters
    13762560
    """

    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.seq_len

    @property
    def matrix_parameters(self) -> int:
        """Entries of the matrices that multiply activations: those of all layers and of the head, not the embedding."""
        return self.n_layers * (4 * self.dim**2 + 3 * self.dim * self.ffn_dim) + self.dim * self.vocab_size

    @property
    def step_flops(self) -> float:
        """Floating-point operations of the matrix products of a forward and a backward pass, nothing recomputed.

        Six for each matrix entry and token; for causal attention 6 L T^2 D B, half of what all pairs would need.

            2 T^2 D forward (half of scores and of weighted values, 2 T^2 D each), twice that backward
        """
        attention = 6 * self.n_layers * self.seq_len**2 * self.dim * self.batch
        return 6 * self.matrix_parameters * self.tokens + attention

    def config(self, placement: str) -> DecoderConfig:
        """The same size as a configuration of normstream."""
        return DecoderConfig(
            placement=placement,
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
            max_seq_len=self.seq_len,
        )


def of_preset(name: str, batch: int) -> ModelShape:
    """The size of one of normstream's presets at its longest sequence.

    >>> of_preset("1.3b", batch=4).tokens
    8192
    """
    p = preset(name)
    return ModelShape(p.dim, p.n_layers, p.n_heads, p.resolved_ffn_dim, p.vocab_size, p.max_seq_len, batch)


SHAPES = {
    "tiny": ModelShape(dim=32, n_layers=2, n_heads=2, ffn_dim=96, vocab_size=64, seq_len=16, batch=2),
    "small": ModelShape(dim=384, n_layers=6, n_heads=6, ffn_dim=1024, vocab_size=8192, seq_len=256, batch=4),
    "400m": of_preset("400m", batch=8),
    "1.3b": of_preset("1.3b", batch=4),
    "wide": ModelShape(dim=4096, n_layers=6, n_heads=32, ffn_dim=11_008, vocab_size=32_000, seq_len=2048, batch=2),
}
"""tiny is for tests, small for CPUs; 400m, 1.3b and wide (widths 1024, 2048, 4096) are for GPUs."""
