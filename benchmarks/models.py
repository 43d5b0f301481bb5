"""Models of one size by several libraries, each as it is trained according to its own documentation.

Every builder returns a ``Trainee``: the module that owns the parameters, and the loss of a batch of tokens (B, T + 1),
of which the first T are read and the last T predicted. All attend through torch's scaled dot products.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.official_block import OfficialSiamese
from benchmarks.shapes import ModelShape
from normstream import DecoderLM, initialize
from normstream.junctions import set_backend
from normstream.tasks.chunked_loss import LARGE_VOCABULARY, head_loss
from normstream.training.recompute import wrap_layers

SEED = 0
BACKENDS = {"ops": "auto", "plain": "plain", "rebuilt": "auto"}


class Trainee(NamedTuple):
    """What a step trains."""

    module: nn.Module
    loss: Callable[[Tensor], Tensor]


def ours(shape: ModelShape, placement: str, how: str, mode: str = "eager") -> Trainee:
    """normstream's decoder: ``eager``, ``compiled`` layer by layer as its training does it, or as a ``whole``.

    ``how`` is ``ops`` (fused junctions where normstream takes them by itself), ``plain`` (none) or ``rebuilt`` (fused,
    and sublayers' inputs are made again for the backward pass instead of kept). Head and loss come in chunks where
    normstream's training does that by itself, on a GPU with a large vocabulary.
    """
    model = DecoderLM(shape.config(placement))
    initialize(model, seed=SEED)
    set_backend(model, BACKENDS[how])  # pyright: ignore[reportArgumentType]
    wrap_layers(model, compiled=mode == "compiled", recomputed="inputs" if how == "rebuilt" else "none")
    hidden = torch.compile(model.hidden, dynamic=False) if mode == "whole" else model.hidden

    def loss(tokens: Tensor) -> Tensor:
        last, targets = hidden(tokens[:, :-1]), tokens[:, 1:].contiguous()
        if tokens.is_cuda and shape.vocab_size >= LARGE_VOCABULARY:
            return head_loss(model, last, targets)[0] / targets.numel()
        return next_token_loss(model.lm_head(last), tokens)

    return Trainee(model, loss)


def official(shape: ModelShape) -> Trainee:
    """The official hybrid-pre block's equations, as a researcher writes them down."""
    model = OfficialSiamese(shape)
    return Trainee(model, lambda tokens: next_token_loss(model(tokens[:, :-1]), tokens))


def llama(shape: ModelShape, *, compiled: bool) -> Trainee:
    """transformers' ``LlamaForCausalLM``, which computes its own loss from labels; compiled as a whole.

    Raises:
        ImportError: where transformers is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    model = LlamaForCausalLM(config)
    call = torch.compile(model, dynamic=False) if compiled else model

    def loss(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1].contiguous()
        return call(input_ids=inputs, labels=inputs).loss  # shifts the labels itself

    return Trainee(model, loss)


def x_transformers(shape: ModelShape, *, compiled: bool) -> Trainee:
    """x-transformers' decoder in its ``AutoregressiveWrapper``; compiled: the decoder, as a whole.

    Raises:
        ImportError: where x-transformers is not installed.
    """
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    layers = Decoder(
        dim=shape.dim,
        depth=shape.n_layers,
        heads=shape.n_heads,
        attn_dim_head=shape.dim // shape.n_heads,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=shape.dim // shape.n_heads,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.ffn_dim / shape.dim,
    )
    model = TransformerWrapper(
        num_tokens=shape.vocab_size, max_seq_len=shape.seq_len, use_abs_pos_emb=False, attn_layers=layers
    )
    if compiled:
        model.forward = torch.compile(model.forward, dynamic=False)
    return Trainee(model, AutoregressiveWrapper(model))


def litgpt(shape: ModelShape, *, compiled: bool) -> Trainee:
    """litgpt's ``GPT`` with its chunked cross-entropy, as its pretraining script does it, which compiles.

    Raises:
        ImportError: where litgpt is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from litgpt.config import Config  # pyright: ignore[reportMissingImports]
        from litgpt.model import GPT  # pyright: ignore[reportMissingImports]
        from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    config = Config(
        block_size=shape.seq_len,
        n_layer=shape.n_layers,
        n_embd=shape.dim,
        n_head=shape.n_heads,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        intermediate_size=shape.ffn_dim,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = GPT(config)
    call = torch.compile(model, dynamic=False) if compiled else model
    return Trainee(model, lambda tokens: chunked_cross_entropy(call(tokens[:, :-1]), tokens[:, 1:].contiguous()))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens from the second on, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def n_parameters(module: nn.Module) -> int:
    """Trainable numbers, each counted once.

    >>> n_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
