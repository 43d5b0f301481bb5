"""Training runs: the loop, checkpoints, metrics, evaluation."""

from normstream.training.checkpoint import Checkpoint as Checkpoint
from normstream.training.checkpoint import find_checkpoint as find_checkpoint
from normstream.training.checkpoint import list_checkpoints as list_checkpoints
from normstream.training.checkpoint import load_model as load_model
from normstream.training.checkpoint import read_checkpoint as read_checkpoint
from normstream.training.checkpoint import read_checkpoint_config as read_checkpoint_config
from normstream.training.config import TrainConfig as TrainConfig
from normstream.training.config import default_config as default_config
from normstream.training.config import resolve as resolve
from normstream.training.config import resolve_device as resolve_device
from normstream.training.config_file import config_from_dict as config_from_dict
from normstream.training.config_file import config_from_yaml as config_from_yaml
from normstream.training.config_file import config_to_dict as config_to_dict
from normstream.training.config_file import config_to_yaml as config_to_yaml
from normstream.training.evaluate import evaluate as evaluate
from normstream.training.init_from import InitReport as InitReport
from normstream.training.init_from import init_from as init_from
from normstream.training.loop import train as train
from normstream.training.metrics import read_metrics as read_metrics
from normstream.training.run_folder import RunFolder as RunFolder
from normstream.training.run_folder import RunResult as RunResult
from normstream.training.run_folder import environment as environment
from normstream.training.signals import Interrupted as Interrupted
from normstream.training.spikes import spike_score as spike_score
from normstream.training.spikes import stability_score as stability_score
