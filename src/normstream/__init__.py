"""normstream: where the norms sit on a Transformer's residual stream.

>>> import torch, normstream
>>> row = normstream.placements.get("siamese").junctions(dim=8, n_layers=2)
>>> state, z = row[0]((), torch.randn(1, 3, 8))
>>> z.shape
torch.Size([1, 3, 8])
"""

from typing import TYPE_CHECKING, Any

from normstream import placements as placements
from normstream.__about__ import __version__ as __version__
from normstream.beam_search import beam_search as beam_search
from normstream.generation import generate as generate
from normstream.init import initialize as initialize
from normstream.junctions import Junction as Junction
from normstream.models import Classifier as Classifier
from normstream.models import ClassifierConfig as ClassifierConfig
from normstream.models import DecoderConfig as DecoderConfig
from normstream.models import DecoderLM as DecoderLM
from normstream.models import DiT as DiT
from normstream.models import DiTConfig as DiTConfig
from normstream.models import Encoder as Encoder
from normstream.models import EncoderConfig as EncoderConfig
from normstream.models import EncoderDecoder as EncoderDecoder
from normstream.models import EncoderDecoderConfig as EncoderDecoderConfig
from normstream.models import ViT as ViT
from normstream.models import ViTConfig as ViTConfig
from normstream.models import preset as preset
from normstream.norms import LayerNorm as LayerNorm
from normstream.norms import NormConfig as NormConfig
from normstream.norms import RMSNorm as RMSNorm

if TYPE_CHECKING:
    from normstream import checkpoints as checkpoints
    from normstream import inspect as inspect


def __getattr__(name: str) -> Any:
    """``normstream.inspect`` and ``normstream.checkpoints`` are imported when they are first used."""
    if name in ("checkpoints", "inspect"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
