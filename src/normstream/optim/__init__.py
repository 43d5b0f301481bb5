"""Parameter groups by role, learning-rate schedules, gradient norms, optimizers, QK-Clip."""

from normstream.optim.config import OptimizerConfig as OptimizerConfig
from normstream.optim.config import QKClipConfig as QKClipConfig
from normstream.optim.gradients import clip_gradients as clip_gradients
from normstream.optim.gradients import global_grad_norm as global_grad_norm
from normstream.optim.gradients import grad_norms as grad_norms
from normstream.optim.gradients import grad_norms_by_role as grad_norms_by_role
from normstream.optim.optimizers import MuonWithAdamW as MuonWithAdamW
from normstream.optim.optimizers import build_optimizer as build_optimizer
from normstream.optim.optimizers import warn_low_precision_gains as warn_low_precision_gains
from normstream.optim.qk_clip import QKClip as QKClip
from normstream.optim.roles import GroupRow as GroupRow
from normstream.optim.roles import Role as Role
from normstream.optim.roles import check_groups as check_groups
from normstream.optim.roles import group_table as group_table
from normstream.optim.roles import parameter_groups as parameter_groups
from normstream.optim.roles import parameter_roles as parameter_roles
from normstream.optim.schedules import ScheduleConfig as ScheduleConfig
from normstream.optim.schedules import learning_rate as learning_rate
