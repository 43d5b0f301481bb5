"""Without Triton, which there is for Linux only, its kernels cannot be imported, not even for their examples."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/normstream/ops/triton_*.py"]
