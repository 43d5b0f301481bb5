"""The commands as a user gives them, in process."""

import json
import math
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normstream import commands, initialize, machine, ops, placements
from normstream.cli import main
from normstream.data import ByteTokenizer, DataConfig, Loader, load_data
from normstream.generation import generate
from normstream.training import checkpoint, evaluate, load_model, read_metrics
from normstream.training.metrics import MetricsWriter

WORDS = ("the", "norm", "of", "a", "residual", "stream", "is", "read", "by", "every", "layer", "and", "joined", "again")
MODEL = "--model.dim 16 --model.n-layers 2 --model.n-heads 2 --model.ffn-dim 32 --model.max-seq-len 64 --model.no-tied"
SHAPE = "--steps 4 --batch-size 2 --data.seq-len 16 --device cpu --eval-every 2 --stats-every 2 --checkpoint-every 3"
SMALL = f"--data text.txt {SHAPE} {MODEL}"
PRE = f"{SMALL} --model.placement pre"


def command(line: str) -> None:
    """No argument of these tests holds a space but a prompt, which is written with underscores."""
    main([word.replace("_", " ") if line.startswith("generate") else word for word in line.split()])


def plain(text: str) -> str:
    """Without the line breaks and boxes that depend on the width of the terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


Fails = Callable[[str], str]
Says = Callable[[str], str]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """What a command prints."""

    def printed(line: str) -> str:
        capsys.readouterr()
        command(line)
        return plain(capsys.readouterr().out)

    return printed


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """The message of a command that is refused: status 2, on standard error, no traceback."""

    def message(line: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            command(line)
        assert stopped.value.code == 2
        error = plain(capsys.readouterr().err)
        assert "Traceback" not in error
        return error

    return message


def write_text(path: Path, seed: int, words: int) -> None:
    path.write_text(" ".join(random.Random(seed).choices(WORDS, k=words)) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a finished run and a finished comparison."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text(folder / "text.txt", seed=0, words=1500)
        write_text(folder / "other.txt", seed=1, words=300)
        command(f"train --out run {PRE}")
        command(f"compare --out both --placements pre siamese --lrs 1e-2 {SMALL}")
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder to work in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run: str | Path) -> list[float]:
    return [row["loss"] for row in read_metrics(Path(run) / "metrics.jsonl", "train")]


def contents(folder: str | Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def value(printed: str, key: str) -> str:
    """The word after a key in a table."""
    return re.findall(rf"(?<!\S){key} (\S+)", printed)[-1]


# train


def test_train_leaves_a_run_folder_and_says_how_it_ended(says: Says):
    printed = says(f"train --out folder/new {PRE}")
    result = json.loads(Path("folder/new/result.json").read_text())
    assert value(printed, "val_loss") == str(result["val_loss"])
    assert value(printed, "diverged_step") == "-"
    assert printed.endswith("Run folder: folder/new")
    assert losses("folder/new") == losses("run")
    names = {path.name for path in Path("folder/new").iterdir()}
    assert names == {".lock", "config.yaml", "run.json", "metrics.jsonl", "checkpoints", "result.json"}
    assert [path.name for path in sorted(Path("folder/new/checkpoints").iterdir())] == [
        "step_00000003",
        "step_00000004",
    ]


def test_dry_run_lists_the_groups_and_creates_nothing(says: Says, here: Path):
    before = contents(here)
    printed = says(f"train --dry-run --out new {PRE} --optimizer.weight-decay 0.25")
    assert contents(here) == before
    # Two layers of four 16 x 16 and three 16 x 32 matrices, and the head; five norms.
    assert "matrix adamw 0.25 15 9,232" in printed
    assert "embedding adamw 0 1 4,112" in printed
    assert "norm_gain adamw 0 5 80" in printed
    assert "all 21 13,424" in printed
    n_bytes = Path("text.txt").stat().st_size
    train_tokens, validation_tokens = re.findall(r"([\d,]+) (?:training|validation) tokens", printed)
    # An end-of-text token closes each half.
    assert int(train_tokens.replace(",", "")) + int(validation_tokens.replace(",", "")) == n_bytes + 2


@pytest.mark.parametrize("option", ["decay-norm-gains", "decay-embeddings"])
def test_decay_can_be_asked_for(option: str, says: Says):
    printed = says(f"train --dry-run {PRE} --optimizer.weight-decay 0.25 --optimizer.{option}")
    assert ("norm_gain adamw 0.25" in printed) == (option == "decay-norm-gains")
    assert ("embedding adamw 0.25" in printed) == (option == "decay-embeddings")


def test_same_seed_same_run_other_seed_not():
    command(f"train --out again {PRE} --seed 0")
    command(f"train --out other {PRE} --seed 1")
    assert losses("again") == losses("run")
    assert losses("other")[0] != losses("run")[0]


def test_a_runs_config_file_reproduces_it():
    command(f"train --out odd {SMALL} --model.placement siamese(depth_scale=paper) --optimizer.lr 3.3e-3 --seed 7")
    command("train --out again --config odd/config.yaml")
    assert losses("again") == losses("odd")
    assert Path("again/config.yaml").read_bytes() == Path("odd/config.yaml").read_bytes()


def test_arguments_change_what_the_config_file_says():
    command("train --out longer --config run/config.yaml --steps 6 --schedule.kind constant")
    command(f"train --out same {PRE} --steps 6 --schedule.kind constant")
    assert losses("longer") == losses("same")
    assert len(losses("longer")) == 6


def test_preset_gives_the_dimensions(says: Says):
    printed = says("train --dry-run --preset 10m --model.n-layers 3 --data text.txt --data.seq-len 16")
    assert "dim: 320" in printed
    assert "n_layers: 3" in printed


def test_resume_of_a_finished_run_changes_nothing(says: Says):
    before = contents("run")
    printed = says(f"train --resume --out run {PRE}")
    assert contents("run") == before
    assert value(printed, "val_loss") == str(json.loads(Path("run/result.json").read_text())["val_loss"])


def stop(line: str, step: int) -> None:
    """Give a command, and send SIGTERM to it once it has written the row of a step."""
    write = MetricsWriter.write

    def write_and_stop(self: MetricsWriter, row: dict[str, Any]) -> None:
        write(self, row)
        if row["kind"] == "train" and row["step"] == step:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_stop)
        with pytest.raises(SystemExit) as stopped:
            command(line)
    assert stopped.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "options",
    ["", "--data.tokenizer bpe:300", "--model.placement siamese --model.dropout 0.5 --grad-accumulation 2"],
    ids=["plain", "bpe", "dropout"],
)
def test_stopped_and_resumed_is_as_never_stopped(options: str):
    line = f"{PRE} {options}"
    command(f"train --out whole {line}")
    stop(f"train --out stopped {line}", step=2)
    assert losses("stopped") == losses("whole")[:2]
    command(f"train --resume --out stopped {line}")
    assert losses("stopped") == losses("whole")


def test_init_from_a_run():
    """With a learning rate of nearly 0, SiameseNorm stays what Pre-Norm's weights make of it."""
    command(f"train --out siamese {SMALL} --model.placement siamese --init-from run --optimizer.lr 1e-30")
    old, new = load_model(Path("run")), load_model(Path("siamese"))
    assert torch.equal(old.lm_head.weight, new.lm_head.weight)
    report = json.loads(Path("siamese/run.json").read_text())["init_from"]
    assert len(report["copied"]) == 21
    # The x stream's norm and the input norm of each of the five junctions.
    assert len(report["new"]) == 10


def test_train_and_eval_are_the_library_calls(says: Says):
    """Against a loop written by hand with torch's own parts."""
    source = DataConfig(source="text.txt", seq_len=16)
    data = load_data(source)
    model = load_model(Path("run"))
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    initialize(model, seed=0)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("tok_embeddings")]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name.startswith("tok_embeddings")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    loader, expected = Loader(data.train, batch_size=2, seed=0), []
    for n in range(1, 5):
        batch = loader.batch(n - 1)
        logits = model(batch.inputs_BT, documents_BT=batch.documents_BT)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2)
        optimizer.step()
        expected.append(loss.item())
    assert losses("run") == pytest.approx(expected, rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, trained[name], rtol=0, atol=1e-6)

    printed, scores = says("eval run --device cpu"), evaluate(model.eval(), data.validation)
    assert float(value(printed, "loss")) == pytest.approx(scores["loss"], rel=1e-5)
    result = json.loads(Path("run/result.json").read_text())
    assert len(data.validation) <= 16 * 2, "the run's own evaluation takes all of the text too"
    assert float(value(printed, "loss")) == pytest.approx(result["val_loss"], rel=1e-5)


# eval and generate


@pytest.mark.parametrize("batch_size", [1, 5])
def test_eval_of_another_text(batch_size: int, says: Says):
    """Every byte but the first is predicted from the 16 before it at most; the tail is left out."""
    printed = says(f"eval run/checkpoints/step_00000004 --data other.txt --batch-size {batch_size} --device cpu")
    text = Path("other.txt").read_bytes()
    tokens = torch.tensor([*text, 256])
    n = (len(tokens) - 1) // 16
    with torch.no_grad():
        logits = load_model(Path("run"))(tokens[: n * 16].view(n, 16))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1 : n * 16 + 1]).item()
    assert float(value(printed, "loss")) == pytest.approx(loss, rel=1e-5)
    assert float(value(printed, "perplexity")) == pytest.approx(math.exp(loss), rel=1e-5)
    bits = loss / math.log(2) * (len(text) + 1) / len(text)
    assert float(value(printed, "bits per byte")) == pytest.approx(bits, rel=1e-5)


def test_eval_of_a_part(says: Says):
    whole, part = says("eval run --device cpu"), says("eval run --batches 1 --batch-size 2 --device cpu")
    validation = load_data(DataConfig(source="text.txt", seq_len=16)).validation
    expected = evaluate(load_model(Path("run")), validation, batch_size=2, batches=1)
    assert float(value(part, "loss")) == pytest.approx(expected["loss"], rel=1e-5)
    assert part != whole


def test_generate_depends_on_its_seed_alone(says: Says):
    line = "generate run --prompt norm_of_ --max-new-tokens 30 --temperature 1.5 --device cpu"
    first = says(f"{line} --seed 1")
    assert first.startswith("norm of ")
    assert says(f"{line} --seed 1") == first
    assert says(f"{line} --seed 2") != first


def test_generate_is_the_library_call(capsys: pytest.CaptureFixture[str]):
    command("generate run --prompt the_ --max-new-tokens 12 --temperature 0 --device cpu")
    prompt = torch.tensor([[116, 104, 101, 32]])
    tokens = generate(load_model(Path("run")), prompt, 12, temperature=0.0, eot=256)
    assert capsys.readouterr().out == ByteTokenizer().decode(tokens[0].tolist()) + "\n"


def test_the_tokenizer_travels_with_the_checkpoint(says: Says):
    command(f"train --out bpe {PRE} --data.tokenizer bpe:300")
    result = json.loads(Path("bpe/result.json").read_text())
    assert float(value(says("eval bpe --device cpu"), "loss")) == pytest.approx(result["val_loss"], rel=1e-5)
    at_home = says("eval bpe --data other.txt --device cpu")
    Path("bpe/checkpoints/step_00000004").rename("moved")
    for name in ("bpe", "run", "text.txt"):
        Path(name).rename(f"gone_{name}")
    assert says("eval moved --data other.txt --device cpu") == at_home
    assert float(value(at_home, "bits per byte")) < 8.5
    assert says("generate moved --prompt residual_stream --max-new-tokens 5 --device cpu").startswith("residual stream")
    assert load_model(Path("moved")).config.vocab_size == 300


# compare and report


def test_compare_leaves_everything(here: Path):
    assert {path.name for path in Path("both").iterdir()} == {
        *(".lock", "config.yaml", "summary.json", "summary.csv", "report.html"),
        *("pre_lr0.01_seed0", "siamese_lr0.01_seed0"),
    }
    summary = json.loads(Path("both/summary.json").read_text())
    command(f"train --out alone {PRE} --optimizer.lr 1e-2")
    assert losses("alone") == losses("both/pre_lr0.01_seed0")
    assert summary["runs"][0]["val_loss"] == json.loads(Path("alone/result.json").read_text())["val_loss"]
    assert summary["runs"][0]["curve"]["train_loss"] == losses("alone")
    assert Path("both/report.html").read_text().startswith("<!doctype html>")


def test_compare_says_what_it_does(says: Says):
    printed = says(f"compare --out new --placements pre --lrs 1e-2 {SMALL}")
    assert "Parameters: Pre-Norm 13,424" in printed
    assert printed.endswith("Report: new/report.html")
    assert json.loads(Path("new/summary.json").read_text())["conclusion"] in printed


def test_compare_from_a_config_file():
    Path("plan.yaml").write_text(
        "{placements: [pre], lrs: [0.01], out: new, base: {steps: 9, batch_size: 2, device: cpu, "
        "data: {source: text.txt, seq_len: 16}, model: {dim: 16, n_layers: 2, n_heads: 2, ffn_dim: 32, tied: false}}}"
    )
    command("compare --config plan.yaml --steps 4")
    assert losses("new/pre_lr0.01_seed0") == losses("both/pre_lr0.01_seed0")


def test_compare_resumes(says: Says):
    line = f"compare --out stopped --placements pre siamese --lrs 1e-2 {SMALL}"
    stop(line, step=3)
    assert says(f"{line} --resume").endswith("Report: stopped/report.html")
    for run in ("pre_lr0.01_seed0", "siamese_lr0.01_seed0"):
        assert losses(f"stopped/{run}") == losses(f"both/{run}")
    before = contents("stopped/pre_lr0.01_seed0")
    command(f"{line} --resume")
    assert contents("stopped/pre_lr0.01_seed0") == before


def test_report_is_written_again_from_the_summary(says: Says):
    report = Path("both/report.html")
    html = report.read_bytes()
    report.unlink()
    assert says("report both") == "Report: both/report.html"
    assert report.read_bytes() == html
    command("report both/summary.json --out elsewhere.html")
    assert Path("elsewhere.html").read_bytes() == html


# list and doctor


def test_list_has_every_placement_with_equation_and_source(says: Says, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commands.console, "_width", 1000)
    printed = says("list")
    for name in placements.names():
        placement = placements.get(name)
        for text in (name, placement.equation, placement.paper, placement.code):
            assert text
            assert plain(text) in printed
    assert "depth_scale=code" in printed


def test_doctor(says: Says):
    printed = says("doctor")
    assert value(printed, "torch") == torch.__version__
    assert value(printed, "threads") == str(torch.get_num_threads())
    assert f"{len(placements.names())}, see normstream list" in printed


def test_doctor_says_what_is_fast_here(says: Says, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commands.console, "_width", 1000)
    printed = says("doctor")
    assert f"({machine.physical_cores()} physical cores for this process)" in printed
    assert value(printed, "vector instructions") == torch.backends.cpu.get_cpu_capability()
    assert (machine.compiler() or "C++ compiler none found") in printed
    for backend, state in ops.status().items():
        assert f"fused junctions, {backend} {state}" in printed
    assert f"allocator {machine.why_not_tuned() or 'training tunes it (tune_allocator)'}" in printed
    assert "torch.compile " in printed
    assert "triton " in printed
    if not torch.cuda.is_available():
        assert "run ahead no: for CUDA only" in printed
        assert "chunked loss no: for CUDA only" in printed


@pytest.mark.parametrize("kind", ["train", "compare"])
def test_training_takes_no_more_threads_than_cores(kind: str, says: Says, monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(machine, "use_physical_cores", lambda: calls.append(kind) or 1)
    said = says(f"{kind} --out new {PRE}" if kind == "train" else f"compare --out new --placements pre {SMALL}")
    assert calls == [kind]
    assert "new" in said


# what is refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        (f"train {SMALL} --model.placement siamse", "did you mean 'siamese'?"),
        (f"train {SMALL} --model.placement siamese(depth_scal=paper)", "did you mean 'depth_scale'?"),
        (f"compare {SMALL} --placements pre siamse", "did you mean 'siamese'?"),
        ("train --preset 1.4b", "unknown preset '1.4b'; did you mean '1.3b'?"),
        (f"train {SMALL} --data.tokenizer byts", "unknown tokenizer 'byts'; did you mean 'bytes'?"),
        (f"train {PRE} --data stdlb", "unknown source 'stdlb'; did you mean 'stdlib'?"),
        (f"train {PRE} --data no/such.txt", "no file or folder no/such.txt"),
        (f"train {PRE} --model.head-dim 7", "rotary positions need an even head_dim, got 7"),
        (f"train {PRE} --model.n-heads 4 --model.n-kv-heads 3", "n_heads 4 is not divisible by n_kv_heads 3"),
        (f"train {PRE} --data short.txt", "the corpus is too short: short.txt gives"),
        (f"train {PRE} --data binary.txt", "binary.txt is not a text file"),
        (f"train {PRE} --device gpu", "device 'gpu' is not available here"),
        (f"train {PRE} --data=", "the source is empty"),
        (f"train {PRE} --optimizer.lr inf", "optimizer.lr must be a number above 0, got inf"),
        (f"train {PRE} --dry-run --device gpu", "device 'gpu' is not available here"),
        (f"train {PRE} --dry-run --init-from nowhere", "no checkpoint in nowhere"),
        (f"train {PRE} --dry-run --out run", "run folder run exists already"),
        (f"train {SMALL} --model.placement post(final_norm=true,final_norm=false)", "'final_norm' is given twice"),
        ("generate run --max-new-tokens 5 --temperature nan", "temperature must be 0 or between"),
        ("train --config no.yaml", "config file no.yaml: "),
        ("train --config typo.yaml", "config file typo.yaml: unknown key 'stpes'; did you mean 'steps'?"),
        (f"train {PRE} --init-from nowhere", "no checkpoint in nowhere"),
        (f"train --resume {PRE} --out text.txt", "no config.yaml, so it is no run folder"),
        (f"compare {SMALL} --seed 3", "a comparison takes no seed of its own, got 3; give seeds"),
        (f"compare {SMALL} --optimizer.lr 1e-3", "no optimizer.lr of its own, got 0.001; give lrs"),
        (f"compare {PRE}", "no model.placement of its own, got pre; give placements"),
        (f"compare {SMALL} --budget soon", "soon"),
        (f"compare {SMALL} --data short.txt", "the corpus is too short"),
        (f"compare --resume {SMALL} --out run", "config file run/config.yaml: unknown key 'task'"),
        ("eval nowhere", "no checkpoint in nowhere"),
        ("eval run --data short.txt", "the text is too short"),
        ("eval run --batch-size 0", "batch_size and batches must be at least 1"),
        ("generate run --prompt=", "the prompt is empty"),
        ("report run", "run/summary.json"),
        ("report text.txt", "cannot read text.txt"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(line: str, message: str, fails: Fails, here: Path):
    Path("short.txt").write_text("too short")
    Path("binary.txt").write_bytes(bytes(500))
    Path("typo.yaml").write_text("stpes: 3")
    before = contents(here)
    assert message in fails(line)
    assert contents(here) == before


def test_brackets_in_a_path_are_no_markup(says: Says):
    assert says(f"train {PRE} --steps 1 --out r/[red]a[/b]").endswith("Run folder: r/[red]a[/b]")


def test_resume_takes_the_folders_own_settings(says: Says, here: Path):
    command(f"train {PRE} --out own")
    before = contents(here)
    assert says("train --resume --out own").endswith("Run folder: own")
    assert contents(here) == before


def test_out_of_memory_gives_advice(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        command(f"train {PRE} --model.ffn-dim 100000000000000 --out huge")
    assert stopped.value.code == 1
    assert "lower batch_size" in capsys.readouterr().err


def test_a_file_that_cannot_be_read(fails: Fails, here: Path, monkeypatch: pytest.MonkeyPatch):
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "text.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot read text.txt: Permission denied" in fails(f"train --out new {PRE}")
    assert not Path("new").exists()


@pytest.mark.parametrize("kind", ["train", "compare"])
def test_a_folder_that_exists_is_left_alone(kind: str, fails: Fails, here: Path):
    before = contents(here)
    line = f"train --out run {PRE}" if kind == "train" else f"compare --out both --placements pre siamese {SMALL}"
    assert "exists already; choose another one (--out), or go on in it (--resume)" in fails(line)
    assert "schedule.kind: cosine -> noam" in fails(f"{line} --resume --schedule.kind noam")
    assert contents(here) == before


@pytest.mark.parametrize("line", ["eval run", "generate run", "train --out new --init-from run"])
def test_a_checkpoint_that_is_cut_off(line: str, fails: Fails):
    weights = Path("run/checkpoints/step_00000004/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    before = contents("run")
    message = fails(f"{line} {PRE}" if line.startswith("train") else line)
    assert f"checkpoint file {weights} is missing or cut off" in message
    assert contents("run") == before
    assert not Path("new").exists()


def test_resume_from_checkpoints_that_are_cut_off(fails: Fails):
    stop(f"train --out stopped {PRE}", step=3)
    weights = Path("stopped/checkpoints/step_00000003/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    before = contents("stopped")
    message = fails(f"train --resume --out stopped {PRE}")
    assert "no intact checkpoint in stopped/checkpoints" in message
    assert contents("stopped") == before


def test_a_full_disk_keeps_what_was_saved(fails: Fails):
    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step_00000004" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path)

    real = checkpoint.save_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save_file)
        message = fails(f"train --out new {PRE}")
    assert "No space left on device" in message
    assert "intact checkpoints: step_00000003; make room and resume" in message
    command(f"train --resume --out new {PRE}")
    assert losses("new") == losses("run")
