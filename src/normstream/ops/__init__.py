"""Junctions as fused operations: one pass over memory forward, one backward."""

from normstream.ops.backends import Backend as Backend
from normstream.ops.backends import status as status
from normstream.ops.fuse import JoinPart as JoinPart
from normstream.ops.fuse import ReadPart as ReadPart
from normstream.ops.fuse import fused as fused
from normstream.ops.rebuild import RebuiltZ as RebuiltZ
from normstream.ops.registration import calls as calls
