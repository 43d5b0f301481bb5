"""A row of sublayers and junctions from an embedding to a final hidden vector: what every model is made of.

Shape suffixes: B batch, T sequence, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from normstream import placements
from normstream.layers import Context, Layer
from normstream.models.model_config import SUBLAYERS, ModelConfig
from normstream.models.roles import StartRole
from normstream.norms import NormConfig
from normstream.placements.placement import Stack

Sublayers = Callable[[int], dict[str, nn.Module]]
"""From the number of a block to its sublayers by kind, in order; see ``normstream.models.sublayers``."""


class Trunk(nn.Module):
    """The first junction and the blocks of one stack; it knows no placement by name, and no kind of model.

        embedding -> before_layers -> layers.0 -> ... -> layers.L-1 -> final hidden vector

    Models of one stack are a ``Trunk`` with an embedding and a head; an encoder-decoder has two.

    Args:
        config: of the model.
        sublayers: makes the sublayers of each block.
        kinds: the kinds of the sublayers of a block, in order.
        n_layers: number of blocks; None means that of the config.
        stack: which stack of the model this is; None means the only one.
        input_norm: conventions of the norms that feed a sublayer directly; None means those of every norm.
        embeddings: what makes the embedding, by name; it is listed before the blocks, in the order of its use.

    >>> import torch
    >>> from normstream.models.sublayers import block_sublayers
    >>> config = ModelConfig(placement="siamese", dim=8, n_layers=2, n_heads=2)
    >>> trunk = Trunk(config, lambda layer: block_sublayers(config, layer))
    >>> z, aux = trunk.run(torch.zeros(1, 3, 8), lambda layer: Context(causal=False))
    >>> z.shape, aux
    (torch.Size([1, 3, 8]), ())
    """

    def __init__(
        self,
        config: ModelConfig,
        sublayers: Sublayers,
        *,
        kinds: Sequence[str] = SUBLAYERS,
        n_layers: int | None = None,
        stack: Stack | None = None,
        input_norm: NormConfig | None = None,
        embeddings: Mapping[str, nn.Module | None] | None = None,
    ) -> None:
        super().__init__()
        n_layers = config.n_layers if n_layers is None else n_layers
        self.placement, self.stack = placements.get(config.placement), stack or Stack()
        junctions = iter(
            self.placement.junctions(
                config.dim,
                n_layers,
                sublayers=kinds,
                norm=config.norm,
                dropout=config.dropout,
                drop_path=config.drop_path,
                stack=self.stack,
                input_norm=input_norm,
            )
        )
        self.before_layers = next(junctions)
        for name, module in (embeddings or {}).items():
            self.add_module(name, module)
        self.layers = nn.ModuleList(
            Layer(sublayers(layer), [next(junctions) for _ in block])
            for layer, block in enumerate(self.placement.blocks(n_layers, kinds))
        )

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the residual streams, in the order of the state."""
        return self.placement.streams

    def tie(self) -> None:
        """Makes matrices share their values where the configuration says so; to repeat after ``to_empty``."""

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``; those not in it are like any other."""
        return {}

    def run(self, embedding_BTD: Tensor, context: Callable[[int], Context]) -> tuple[Tensor, tuple[Any, ...]]:
        """The final hidden vectors (B, T, D), and what the sublayers report (see ``Layer``).

        Args:
            embedding_BTD: what the streams start as.
            context: what the sublayers of each block share.
        """
        aux: tuple[Any, ...] = ()
        state, z_BTD = self.before_layers((), embedding_BTD)
        for index, layer in enumerate(self.layers):
            state, z_BTD, reports = layer(state, z_BTD, context(index))
            aux += reports
        return z_BTD, aux


def trunks(model: nn.Module) -> dict[str, Trunk]:
    """The stacks of a model by name, in the order in which they run: itself as "", or an encoder and a decoder.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> list(trunks(DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2))))
    ['']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, Trunk)}
