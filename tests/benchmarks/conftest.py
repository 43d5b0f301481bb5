"""The benchmarks are no installed package: they are imported from the root of the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
