"""Run as a process: does runs side by side, all by one config, until it is killed.

python left_behind.py CONFIG RUN_FOLDER ...
"""

import sys
from pathlib import Path

from normstream.lab.workers import side_by_side
from normstream.training import TrainConfig, config_from_yaml


def main(config_file: str, *folders: str) -> None:
    config = config_from_yaml(Path(config_file).read_text(), TrainConfig)
    runs = [(number, config, Path(folder)) for number, folder in enumerate(folders)]
    for _ in side_by_side(runs, config, jobs=len(folders)):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
