"""Named placements: recipes that say which junctions stand between the sublayers of a model.

>>> names()
['bloom', ..., 'pre', ..., 'swin_v2']
>>> str(get("siamese(depth_scale=paper)"))
'siamese(depth_scale=paper)'
"""

from normstream.placements import deepnorm as deepnorm
from normstream.placements import geo_norm as geo_norm
from normstream.placements import hyper_connections as hyper_connections
from normstream.placements import keel as keel
from normstream.placements import ngpt as ngpt
from normstream.placements import norm_mixtures as norm_mixtures
from normstream.placements import normformer as normformer
from normstream.placements import output_norm as output_norm
from normstream.placements import pre_norm_family as pre_norm_family
from normstream.placements import realformer as realformer
from normstream.placements import residual as residual
from normstream.placements import siamese_hyper as siamese_hyper
from normstream.placements import span_norm as span_norm
from normstream.placements import sub_ln as sub_ln
from normstream.placements.placement import Build as Build
from normstream.placements.placement import InitScheme as InitScheme
from normstream.placements.placement import Placement as Placement
from normstream.placements.placement import Slot as Slot
from normstream.placements.placement import Stack as Stack
from normstream.placements.registry import get as get
from normstream.placements.registry import names as names
from normstream.placements.registry import register as register
from normstream.placements.siamese import SiameseNorm as SiameseNorm
from normstream.placements.siamese import SiameseNormHybridPre as SiameseNormHybridPre
from normstream.placements.single_stream import PostNorm as PostNorm
from normstream.placements.single_stream import PreNorm as PreNorm

DEFAULT = SiameseNorm.name
"""The placement of a configuration that names none."""
