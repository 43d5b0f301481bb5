"""Run as a process: trains by a config file and sends itself a signal right after the row of one step.

python interrupted_run.py CONFIG RUN_FOLDER SIGNAL STEP
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from normstream.training import TrainConfig, config_from_yaml, train


def main(config_file: str, run_folder: str, signal_name: str, step: str) -> None:
    torch.set_num_threads(1)

    def on_row(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == int(step):
            os.kill(os.getpid(), signal.Signals[signal_name])

    train(config_from_yaml(Path(config_file).read_text(), TrainConfig), Path(run_folder), on_row=on_row)


if __name__ == "__main__":
    main(*sys.argv[1:])
