"""Training: batches in, updates, rows of metrics, checkpoints, a result."""

import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normstream.data import Loader
from normstream.init import initialize
from normstream.machine import tune_allocator
from normstream.models import build_model
from normstream.tasks import TaskData, get_task
from normstream.training.checkpoint import (
    Checkpoint,
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from normstream.training.config import TrainConfig, resolve, resolve_device
from normstream.training.config_file import config_to_dict, config_to_yaml
from normstream.training.divergence import MAX_SKIPS_IN_A_ROW, collapsed, nonfinite_cause
from normstream.training.files import write_text
from normstream.training.init_from import InitReport, init_from
from normstream.training.lock import FolderLock
from normstream.training.metrics import MetricsWriter, finite
from normstream.training.prefetch import Prefetcher
from normstream.training.probes import LayerProbe
from normstream.training.progress import Progress
from normstream.training.resume import check_changes, newest_intact
from normstream.training.run_folder import RunFolder, RunResult, environment
from normstream.training.signals import Interrupted, StopSignals
from normstream.training.spinning import SpinControl, spinning_threads
from normstream.training.step import Update, Updater

OnRow = Callable[[dict[str, Any]], None]


def train(
    config: TrainConfig,
    run_dir: Path,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    data: TaskData | None = None,
    on_row: OnRow | None = None,
) -> RunResult:
    """Trains a model and leaves everything about it in a run folder (see ``normstream.training.run_folder``).

    Args:
        config: the run; what the data decides of the model (its vocab_size, say) is taken from there.
        run_dir: a new folder, or with ``resume`` that of the run to go on with. A run that was killed goes on from its
            newest checkpoint, one that has ended returns its result, and where there is none yet one is started.
        resume: see there.
        accept_changes: resume although the config differs in the learning rate, schedule, steps or the like.
        data: what the task's ``load(config.data)`` would give, to load it once for many runs.
        on_row: called with every row of metrics after it is written.

    Raises:
        ValueError: before any training, for a folder that exists or that another process is at work in, a config that
            does not fit the data or the run that is resumed, and for damaged checkpoints.
        OSError: for a full disk; earlier checkpoints are intact.
        Interrupted: after SIGTERM, SIGHUP or Ctrl-C, when the update in progress and a checkpoint are done.
    """
    run = RunFolder(run_dir)
    exists = run.check(resume)
    allocator = tune_allocator() if config.tune_allocator else "left as it is, by tune_allocator"
    data = get_task(config.task).load(config.data) if data is None else data
    if data.config != config.data:
        raise ValueError(f"the data given was loaded with another config: {data.config}, expected {config.data}")
    config = resolve(config, data)
    device = resolve_device(config.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), StopSignals() as stop:
        trainer = Trainer(config, run, data, device, on_row, allocator)
        if not exists:
            trainer.init_from()
        with FolderLock(run.path), closing(trainer):
            if not run.check(resume):  # asked again, now that no other process can write there
                trainer.start()
            elif (result := _finished(run, config, accept_changes)) is not None:
                return result
            else:
                trainer.go_on(accept_changes)
            return trainer.run_to_end(stop)


def _finished(run: RunFolder, config: TrainConfig, accept_changes: bool) -> RunResult | None:
    """The result of a run that has ended; None, with the old result set aside, if changes make it go on."""
    result = run.read_result()
    if result is not None and check_changes(run.read_config(), config, result.steps, accept_changes):
        run.result.rename(run.result.with_name(f"result_after_step_{result.steps:08d}.json"))
        return None
    return result


class Started(NamedTuple):
    """An update that has been started."""

    result: Callable[[], Update]
    """Waits for what it reports."""
    probe: LayerProbe | None
    """What measured the layers, at steps that have a row of their statistics."""


class Trainer:
    """One run in progress: the model, its updater, its data and its folder."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        data: TaskData,
        device: torch.device,
        on_row: OnRow | None,
        allocator: str,
    ) -> None:
        self.config, self.run, self.data, self.device, self.on_row = config, run, data, device, on_row
        self.allocator = allocator
        self.loader = Loader(data.train, config.batch_size, config.seed)
        self.task = get_task(config.task)(config, data)
        self.model = build_model(config.model)
        initialize(self.model, config.seed)
        self.progress = Progress.new(self.task.uniform_loss())
        self.metrics: MetricsWriter | None = None
        self.init_report: InitReport | None = None
        self.updater: Updater
        self.batches: Prefetcher | None = None
        self.spinning = SpinControl(spinning_threads(device))
        self.started: Started | None = None

    def init_from(self) -> None:
        """Takes the weights that the config says to start from, if any; nothing is written yet."""
        if self.config.init_from is not None:
            self.init_report = init_from(self.model, self.config.init_from)

    def start(self) -> None:
        """Starts a new run with the weights there are."""
        self._to_device()
        parameters, non_embedding = _sizes(self.model)
        info = {
            "environment": environment() | {"device": str(self.device), "allocator": self.allocator},
            "corpus_hash": self.data.corpus_hash,
            "unit": self.task.unit,
            "train_size": self.data.train.size,
            "validation_size": self.data.validation.size,
            "tokenizer": None if self.data.tokenizer is None else self.data.tokenizer.name,
            "parameters": parameters,
            "non_embedding_parameters": non_embedding,
            "init_from": None if self.init_report is None else asdict(self.init_report),
        }
        self.run.create(self.config, info)
        self.metrics = MetricsWriter(self.run.metrics)

    def go_on(self, accept_changes: bool) -> None:
        """Continues the run in the folder from its newest intact checkpoint, or starts it anew if it has none."""
        old = self.run.read_config()
        checkpoint, problems = newest_intact(self.run)
        step = 0 if checkpoint is None else checkpoint.step
        changed = check_changes(old, self.config, step, accept_changes)
        if old != self.config:
            kept = self.run.config.with_name(f"config_before_step_{step + 1:08d}.yaml")
            if not kept.exists():
                write_text(kept, self.run.config.read_text(encoding="utf-8"))
            write_text(self.run.config, config_to_yaml(self.config))
        if checkpoint is None:
            self.init_from()
            self.start()
        else:
            self._to_device()
            self._restore(checkpoint)
        if changed:
            self._event(step, "config_changed", changed)
        for problem in problems:
            self._event(step, "damaged_checkpoint", problem)

    def _to_device(self) -> None:
        self.model.to(self.device).train()
        self.updater = Updater(self.model, self.config, self.task)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint, and drops the rows of metrics written after it."""
        state = checkpoint.state
        if state["corpus_hash"] != self.data.corpus_hash:
            raise ValueError(f"the data has changed since {checkpoint.path} was saved: its hash is another one")
        load_model_tensors(self.model, checkpoint.model, checkpoint.path)
        load_optimizer_tensors(self.updater.optimizer, checkpoint.optimizer)
        if self.updater.ema is not None:
            applied = state["progress"]["step"] - state["progress"]["skipped"]
            self.updater.ema.load(checkpoint.average, applied, checkpoint.path)
        if state["scaler"]:
            self.updater.scaler.load_state_dict(state["scaler"])
        self.progress = Progress.from_state(state["progress"])
        self.metrics = MetricsWriter(self.run.metrics, state["metrics_bytes"])

    def run_to_end(self, stop: StopSignals) -> RunResult:
        """Does the remaining updates; returns the result, or raises Interrupted after a signal."""
        config, progress = self.config, self.progress
        began = time.perf_counter() - progress.seconds
        steps, is_cuda = range(progress.step, config.steps), self.device.type == "cuda"
        self.batches = Prefetcher(self.loader, steps, ahead=config.prefetch, pinned=is_cuda)
        while progress.step < config.steps:
            step = progress.step + 1
            cause = self._update(step, stop)
            progress.seconds = time.perf_counter() - began
            if cause is not None:
                return self._finish(None, step, cause)
            progress.step = step
            last = step == config.steps
            if last or step % config.eval_every == 0:
                self._evaluate(step)
            progress.seconds = time.perf_counter() - began
            stops = stop.received is not None and self.started is None
            if last or step % config.checkpoint_every == 0 or stops:
                path = self.save()
                if stop.received is not None and not last:
                    raise Interrupted(stop.received, step, path)
        result = self._finish(progress.val_loss, *self._verdict())
        if stop.received is not None:
            raise Interrupted(stop.received, progress.step, self.run.path)
        return result

    def _update(self, step: int, stop: StopSignals) -> str | None:
        """Does one update and writes its rows; returns why the run cannot go on, or None.

        Where the device decides by itself whether an update is applied, the next one is started before this one's
        numbers are read, unless something is to be done between the two.
        """
        config, clock, cpu_clock = self.config, time.perf_counter(), time.process_time()
        started = self.started or self._start(step)
        pauses = step == config.steps or step % config.eval_every == 0 or step % config.checkpoint_every == 0
        ahead = self.updater.runs_ahead and not pauses and stop.received is None
        self.started = self._start(step + 1) if ahead else None
        update = started.result()
        layers = None
        if started.probe is not None:
            layers = started.probe.row(step)
            if self.updater.qk_clip is not None:
                layers["max_logit"] = self.updater.qk_clip.max_logits()
        seconds = time.perf_counter() - clock
        self.spinning.note(seconds, time.process_time() - cpu_clock)

        spike = self.progress.count(step, update, seconds)
        self._write(self._train_row(step, update, seconds))
        if layers is not None:
            self._write(layers)
        if spike:
            self._event(step, "spike", f"training loss {update.loss:.4g} is far above those before it")
        return None if update.applied else self._not_applied(step, update)

    def _start(self, step: int) -> "Started":
        assert self.batches is not None
        batch = self.batches.batch(step - 1)
        if step % self.config.stats_every and step != self.config.steps:
            return Started(self.updater.start(step, batch), None)
        with LayerProbe(self.model) as probe:
            return Started(self.updater.start(step, batch, probe), probe)

    def _train_row(self, step: int, update: Update, seconds: float) -> dict[str, Any]:
        batch_tokens = self.tokens_per_update
        row = {
            "kind": "train",
            "step": step,
            "loss": update.loss,
            "lr": update.lr,
            "grad_norm": update.grad_norm,
            "tokens": round(step * batch_tokens),
            "tokens_per_second": round(batch_tokens / seconds, 1),
        }
        extra = update.parts | {name: getattr(update, name) for name in ("max_logit", "clipped_heads")}
        row |= {name: value for name, value in extra.items() if value is not None}
        if self.updater.scaler.is_enabled():
            row |= {"loss_scale": self.updater.scaler.get_scale(), "skipped": self.progress.skipped}
        return row

    def _not_applied(self, step: int, update: Update) -> str | None:
        """Records a skipped update, or that the run is over, with the cause."""
        cause = nonfinite_cause(update.loss, update.grad_norm)
        assert cause is not None
        scaler = self.updater.scaler
        if scaler.is_enabled() and math.isfinite(update.loss):
            self._event(step, "skipped", f"{cause}; loss scale is now {scaler.get_scale():g}")
            if self.progress.skipped_in_a_row < MAX_SKIPS_IN_A_ROW:
                return None
            cause = f"{MAX_SKIPS_IN_A_ROW} updates in a row skipped, the last since {cause}"
        self._event(step, "nonfinite", cause)
        return cause

    def _evaluate(self, step: int) -> None:
        with self.updater.averaged():
            scores = self.task.evaluate(self.model)
        self.progress.evaluated(scores["loss"])
        self.progress.scores = {name: value for name, value in scores.items() if name != "loss"}
        self._write({"kind": "eval", "step": step, **scores})

    def save(self) -> Path:
        """Saves a checkpoint of the state after the last update; returns its folder."""
        assert self.metrics is not None
        state = {
            "config": config_to_dict(self.config),
            "corpus_hash": self.data.corpus_hash,
            "metrics_bytes": self.metrics.sync(),
            "scaler": self.updater.scaler.state_dict(),
            "progress": self.progress.state(),
        }
        return save_checkpoint(
            self.run.checkpoints,
            self.progress.step,
            model_tensors(self.model),
            optimizer_tensors(self.updater.optimizer),
            finite(state),
            self.config.keep_checkpoints,
            None if self.data.tokenizer is None else self.data.tokenizer.to_json(),
            None if self.updater.ema is None else self.updater.ema.tensors(),
        )

    def _verdict(self) -> tuple[int | None, str | None]:
        """Step and cause of the divergence of a run that did all its updates, or twice None."""
        progress = self.progress
        cause, step = progress.divergence.cause(), progress.divergence.above_since
        if cause is None and progress.val_loss is not None and not math.isfinite(progress.val_loss):
            cause, step = f"validation loss is {progress.val_loss}", progress.step
        if cause is not None:
            self._event(progress.step, "diverged", cause)
        return step, cause

    def _finish(self, val_loss: float | None, diverged_step: int | None, cause: str | None) -> RunResult:
        """Judges the run and writes result.json."""
        progress = self.progress
        tokens = progress.step * self.tokens_per_update
        parameters, non_embedding = _sizes(self.model)
        baseline = self.task.baseline_loss()
        result = RunResult(
            steps=progress.step,
            train_loss=progress.divergence.mean() if progress.divergence.recent else None,
            val_loss=finite(val_loss),
            best_val_loss=progress.best_val_loss,
            diverged=cause is not None,
            diverged_step=diverged_step,
            cause=cause,
            collapsed=collapsed(val_loss, baseline, progress.step),
            baseline_loss=baseline,
            metrics=self._metrics(val_loss),
            spikes=progress.spikes.count,
            skipped=progress.skipped if self.updater.scaler.is_enabled() else 0,
            tokens_per_second=round(tokens / progress.update_seconds, 1),
            seconds=round(progress.seconds, 3),
            parameters=parameters,
            non_embedding_parameters=non_embedding,
        )
        if result.collapsed:
            known = f"knowing only {self.task.baseline}"
            cause = f"validation loss {val_loss:.4g} is hardly below that of {known}, {baseline:.4g}"
            self._event(progress.step, "collapsed", cause)
        if self.metrics is not None:
            self.metrics.sync()
        self.run.write_result(result)
        return result

    def _metrics(self, val_loss: float | None) -> dict[str, float]:
        """The task's measures of success of a run that did all its updates; a run that broke off has none."""
        if val_loss is None:
            return {}
        if not math.isfinite(val_loss):
            return self.progress.scores
        with self.updater.averaged():
            return self.progress.scores | self.task.judge(self.model, self.run.path)

    @property
    def tokens_per_update(self) -> float:
        """Positions that the model works on in one update."""
        return self.config.batch_size * self.task.tokens_per_sample(self.config, self.data)

    def _event(self, step: int, event: str, cause: str) -> None:
        self._write({"kind": "event", "step": step, "event": event, "cause": cause})

    def _write(self, row: dict[str, Any]) -> None:
        assert self.metrics is not None
        self.metrics.write(row)
        if self.on_row is not None:
            self.on_row(row)

    def close(self) -> None:
        """Closes the metrics file, and ends the threads of the run."""
        with closing(self.spinning), closing(self.batches) if self.batches is not None else nullcontext():
            if self.metrics is not None:
                self.metrics.close()


def _sizes(model: torch.nn.Module) -> tuple[int, int]:
    """Number of parameters, and the same without the tables of token embeddings."""
    total = sum(p.numel() for p in model.parameters())
    tables = {name: p for name, p in model.named_parameters() if name.endswith("tok_embeddings.weight")}
    return total, total - sum(p.numel() for p in tables.values())
