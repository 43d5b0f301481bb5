"""Junctions: where a sublayer's update meets the residual streams, and where the next sublayer reads them."""

from normstream.junctions.junction import Drop as Drop
from normstream.junctions.junction import Join as Join
from normstream.junctions.junction import Junction as Junction
from normstream.junctions.junction import Read as Read
from normstream.junctions.junction import Start as Start
from normstream.junctions.junction import State as State
from normstream.junctions.siamese import HybridPreRead as HybridPreRead
from normstream.junctions.siamese import SiameseJoin as SiameseJoin
from normstream.junctions.siamese import SiameseRead as SiameseRead
from normstream.junctions.siamese import SiameseStart as SiameseStart
from normstream.junctions.single_stream import PostNormJoin as PostNormJoin
from normstream.junctions.single_stream import PostNormRead as PostNormRead
from normstream.junctions.single_stream import PreNormJoin as PreNormJoin
from normstream.junctions.single_stream import PreNormRead as PreNormRead
