"""Any Transformer: where its norms are, and what its residual stream does.

    loaded = normstream.checkpoints.load_source("path-or-name")
    inspection = normstream.inspect.inspect_model(loaded)
    normstream.inspect.write_report(inspection, Path("report.html"))

and the parts of it: ``make_inputs``, ``anatomy_of``, ``trace``, ``identity``.

>>> import torch
>>> from normstream.models import DecoderConfig, DecoderLM
>>> model = DecoderLM(DecoderConfig(placement="siamese", vocab_size=9, dim=8, n_layers=1, n_heads=2)).eval()
>>> seen = trace(model, {"tokens_BT": torch.zeros(1, 3, dtype=torch.int64)})
>>> [name for name in seen.named() if "ffn.update" in name]
['layers.0.ffn.update.x', 'layers.0.ffn.update.y']
"""

from normstream.inspect.anatomy import Anatomy as Anatomy
from normstream.inspect.anatomy import Call as Call
from normstream.inspect.anatomy import NormFacts as NormFacts
from normstream.inspect.anatomy import NormSite as NormSite
from normstream.inspect.anatomy import StackAnatomy as StackAnatomy
from normstream.inspect.anatomy import Sublayer as Sublayer
from normstream.inspect.inputs import make_inputs as make_inputs
from normstream.inspect.inspection import Inspection as Inspection
from normstream.inspect.measures.stream_trace import Trace as Trace
from normstream.inspect.measures.stream_trace import check_identity as check_identity
from normstream.inspect.measures.stream_trace import identity as identity
from normstream.inspect.measures.stream_trace import trace as trace
from normstream.inspect.probing.norm_facts import find_norms as find_norms
from normstream.inspect.probing.probe import anatomy_of as anatomy_of
from normstream.inspect.report.diagram import draw_wiring as draw_wiring
from normstream.inspect.report.page import render as render
from normstream.inspect.report.page import write_report as write_report
from normstream.inspect.run import inspect_model as inspect_model
