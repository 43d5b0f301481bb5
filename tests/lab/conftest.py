import math
from collections.abc import Callable, Mapping, Sequence

import pytest

UNIGRAM_LOSS = 3.25
SIAMESE_WINS = {
    ("pre", 0.002): [2.31, 2.35, 2.37, 2.29, 2.33],
    ("post", 0.002): [2.22, 2.25, 2.20, 2.21, 2.24],
    ("siamese", 0.002): [2.12, 2.14, 2.10, 2.11, 2.13],
    ("pre", 0.01): [2.47, 2.55, 2.45, 2.50, 2.52],
    ("post", 0.01): [3.22, 3.23, 3.22, 3.23, 3.22],
    ("siamese", 0.01): [2.05, 2.30, 1.97, 2.02, 2.10],
}
STREAMS = {"siamese": ("x", "y"), "siamese_hybrid_pre": ("x", "y")}


def curve(final: float | None, steps: int, seed: int) -> dict:
    train_steps = list(range(2, steps + 1, 2))
    val_steps = list(range(25, steps + 1, 25))
    target = 3.2 if final is None else final

    def loss(step: int) -> float:
        return target + (5.55 - target) * math.exp(-(step - 1) / 28) + 0.004 * math.sin(step + seed)

    return {
        "step": train_steps,
        "train_loss": [loss(step) + 0.05 * math.sin(7 * step + seed) for step in train_steps],
        "grad_norm": [0.4 + 2 * math.exp(-step / 30) + 0.1 * math.sin(5 * step + seed) for step in train_steps],
        "val_step": val_steps,
        "val_loss": [*(loss(step) for step in val_steps[:-1]), final],
        "val_metrics": {},
    }


def made_up_run(placement: str, lr: float, seed: int, val_loss: float | None, n_layers: int = 12) -> dict:
    streams = STREAMS.get(placement, ("x",))
    grows = {"x": 0.0 if placement != "pre" else 0.3, "y": 0.25}
    return {
        "placement": placement,
        "lr": lr,
        "seed": seed,
        "path": f"{placement}_lr{lr:g}_seed{seed}",
        "status": "finished",
        "parameters": 612_864 + (3_200 if len(streams) == 2 else 0),
        "steps": 300,
        "val_loss": val_loss,
        "best_val_loss": val_loss,
        "train_loss": val_loss,
        "diverged": False,
        "collapsed": val_loss is not None and val_loss > UNIGRAM_LOSS - 0.05,
        "diverged_step": None,
        "cause": None,
        "baseline_loss": UNIGRAM_LOSS,
        "metrics": {},
        "spikes": seed % 2,
        "max_grad_norm": 2.4 + seed,
        "tokens_per_second": 21_500.0 - 900 * len(streams),
        "seconds": 14.2,
        "curve": curve(val_loss, 300, seed),
        "layers": {
            "step": 300,
            "grad_norm": [0.05 * (1 + seed / 10) * (0.8 if placement == "post" else 1.1) ** i for i in range(n_layers)],
            "rms": {s: [(1 + seed / 20) * math.exp(grows[s] * i) for i in range(n_layers + 1)] for s in streams},
        },
    }


def made_up(losses: Mapping[tuple[str, float], Sequence[float | None]] = SIAMESE_WINS) -> dict:
    """A summary as compare writes it, but with the final validation losses (one for each seed) that a test wants."""
    runs = [made_up_run(p, lr, seed, loss) for (p, lr), values in losses.items() for seed, loss in enumerate(values)]
    return {
        "format": 2,
        "task": "lm",
        "created": "2026-01-31T12:00:00+00:00",
        "command": "normstream compare",
        "normstream": "0.1.0",
        "environment": {"python": "3.11.2", "torch": "2.13.0", "platform": "Linux x86_64", "threads": 2},
        "data": {
            "source": "stdlib",
            "corpus_hash": "0123456789abcdef" * 4,
            "tokenizer": "bytes",
            "unit": "tokens",
            "train_size": 17_345_678,
            "baseline_loss": UNIGRAM_LOSS,
        },
        "placements": list(dict.fromkeys(p for p, _ in losses)),
        "lrs": sorted({lr for _, lr in losses}),
        "seeds": list(range(len(next(iter(losses.values()))))),
        "tokens_per_run": 300 * 8 * 128,
        "start": "started from the same values wherever two models have the same parameter",
        "budget": None,
        "config": {
            "model": {"dim": 64, "n_layers": 12, "n_heads": 4, "norm": {"kind": "rms", "eps": 1e-5}},
            "data": {"source": "stdlib", "tokenizer": "bytes", "seq_len": 128},
            "optimizer": {"lr": 0.002, "betas": [0.9, 0.95]},
            "schedule": {"kind": "cosine", "warmup": 0},
            "steps": 300,
            "batch_size": 8,
            "clip": 1.0,
        },
        "unfinished": False,
        "runs": runs,
        "table": [],
        "conclusion": "",
    }


def many() -> dict:
    """Ten placements at two rates with two seeds: one diverges at the high rate, four collapse, Post-Norm at both.

    `p0` has the lowest loss, 2.0, and each one after it 0.1 more; at the high rate all others have 0.05 less.
    """
    names = ("p0", "p1", "post", "p3", "pre", "p5", "p6", "siamese", "p8", "p9")
    losses: dict[tuple[str, float], list[float | None]] = {}
    for i, name in enumerate(names):
        low = 2.0 + 0.1 * i
        losses[name, 0.001] = [3.22, 3.24] if name == "post" else [low - 0.01, low + 0.01]
        losses[name, 0.01] = [3.22, low] if name in ("post", "p3", "p5", "p6") else [low - 0.06, low - 0.04]
    losses["p8", 0.01] = [None, 2.8]
    summary = made_up(losses)
    for run in summary["runs"]:
        if run["val_loss"] is None:
            run |= {"diverged": True, "diverged_step": 30, "cause": "training loss is nan", "layers": None}
    return summary


@pytest.fixture
def many_summary() -> dict:
    return many()


@pytest.fixture(scope="session")
def made_up_summary() -> Callable[..., dict]:
    return made_up


@pytest.fixture
def summary() -> dict:
    """Five seeds in which SiameseNorm wins and Post-Norm collapses at the high learning rate."""
    return made_up()
