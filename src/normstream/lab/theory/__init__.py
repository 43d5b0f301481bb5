"""Theory that runs: what papers prove about placements at initialization, predicted and measured side by side."""

from normstream.lab.theory.config import TheoryConfig as TheoryConfig
from normstream.lab.theory.report import write_theory_report as write_theory_report
from normstream.lab.theory.theory import theory as theory
