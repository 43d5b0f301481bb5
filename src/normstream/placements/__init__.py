"""Named placements: recipes that say which junctions stand between the sublayers of a model.

>>> names()
['post', 'pre', 'siamese', 'siamese_hybrid_pre']
>>> str(get("siamese(depth_scale=paper)"))
'siamese(depth_scale=paper)'
"""

from normstream.placements import siamese as _siamese
from normstream.placements import single_stream as _single_stream
from normstream.placements.placement import Build as Build
from normstream.placements.placement import InitScheme as InitScheme
from normstream.placements.placement import Placement as Placement
from normstream.placements.placement import Slot as Slot
from normstream.placements.placement import Stack as Stack
from normstream.placements.registry import get as get
from normstream.placements.registry import names as names
from normstream.placements.registry import register as register

DEFAULT = _siamese.SiameseNorm.name
PostNorm = _single_stream.PostNorm
PreNorm = _single_stream.PreNorm
SiameseNorm = _siamese.SiameseNorm
SiameseNormHybridPre = _siamese.SiameseNormHybridPre
