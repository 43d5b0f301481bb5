"""Models: sublayers and junctions, nothing else."""

from normstream.layers import LatentConfig as LatentConfig
from normstream.layers import PositionConfig as PositionConfig
from normstream.models.config import DecoderConfig as DecoderConfig
from normstream.models.decoder import DecoderLM as DecoderLM
from normstream.models.families import FAMILIES as FAMILIES
from normstream.models.families import family as family
from normstream.models.presets import PRESETS as PRESETS
from normstream.models.presets import preset as preset
