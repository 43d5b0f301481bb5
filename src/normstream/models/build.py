"""From a configuration to the model that it describes."""

from typing import Any

from normstream.models.classifier import Classifier
from normstream.models.config import DecoderConfig
from normstream.models.decoder import DecoderLM
from normstream.models.dit import DiT, DiTConfig
from normstream.models.encoder import Encoder
from normstream.models.encoder_config import ClassifierConfig, EncoderConfig
from normstream.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from normstream.models.model_config import ModelConfig
from normstream.models.vit import ViT, ViTConfig

MODELS: dict[type[ModelConfig], type[Any]] = {
    DecoderConfig: DecoderLM,
    EncoderConfig: Encoder,
    ClassifierConfig: Classifier,
    EncoderDecoderConfig: EncoderDecoder,
    ViTConfig: ViT,
    DiTConfig: DiT,
}
"""The model class of each configuration class."""


def build_model(config: ModelConfig) -> Any:
    """The model of a configuration, with torch's default values until ``normstream.initialize`` sets its parameters.

    Raises TypeError for a configuration that is of no kind of model.

    >>> type(build_model(DecoderConfig(dim=8, n_layers=1, n_heads=2))).__name__
    'DecoderLM'
    """
    if type(config) not in MODELS:
        known = ", ".join(kind.__name__ for kind in MODELS)
        raise TypeError(f"no model is made from a {type(config).__name__}; expected one of {known}")
    return MODELS[type(config)](config)
