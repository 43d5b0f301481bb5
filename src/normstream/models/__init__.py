"""Models: sublayers and junctions, nothing else."""

from normstream.models.config import DecoderConfig as DecoderConfig
from normstream.models.decoder import DecoderLM as DecoderLM
from normstream.models.presets import PRESETS as PRESETS
from normstream.models.presets import preset as preset
