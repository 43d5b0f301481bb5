"""What a matrix is for, as far as its start is concerned; see ``normstream.init``."""

from typing import Literal

StartRole = Literal["vocabulary", "positions", "query_key", "value", "output", "ffn_in", "zero", "unit"]
"""vocabulary: embedding or head; positions: table of learned positions; output: writes to the residual streams; ffn_in:
into the feed-forward; query_key: those two, and any other matrix; zero: starts at 0 (adaLN-zero); unit: starts
with standard deviation 1 (an embedding that neither a norm nor a sum with larger ones follows)."""
