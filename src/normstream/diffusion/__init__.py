"""Diffusion: the process that turns images into noise, how a model is trained on it, and how images are drawn."""

from normstream.diffusion.fid import frechet_distance as frechet_distance
from normstream.diffusion.process import Process as Process
from normstream.diffusion.process import Schedule as Schedule
from normstream.diffusion.process import variational_bound as variational_bound
from normstream.diffusion.sampling import Sampler as Sampler
from normstream.diffusion.sampling import SamplingConfig as SamplingConfig
from normstream.diffusion.sampling import guided as guided
from normstream.diffusion.sampling import sample as sample
