"""Two processes that share a model's parameters start it with the values that one process gives it."""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from normstream.init import SCHEMES, initialize
from normstream.layers.latent_attention import LatentConfig
from normstream.models import DecoderConfig, DecoderLM

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
LATENT = LatentConfig(kv_rank=6, nope_head_dim=4, rope_head_dim=2, v_head_dim=3)


PLACEMENTS = (
    "pre",
    "siamese_hybrid_pre",
    "siamese_depth_attention",
    "hyper_connections",
    "mhc",
    "normformer",
    "swin_v2",
)


def configs() -> dict[str, DecoderConfig]:
    """Placements with parameters of their own, every scheme, sizes that two processes cannot share equally."""

    def config(placement: str = "pre", **options: Any) -> DecoderConfig:
        return replace(DecoderConfig(placement, vocab_size=33, dim=12, n_layers=2, n_heads=2), **options)

    named = {name: config(name) for name in PLACEMENTS}
    for init in SCHEMES:
        named[init] = config(init=init, bias="all", tied=init == "xavier", ffn_dim=13)
    return named | {"nGPT": config("ngpt"), "latent": config(init="deepnorm", latent=LATENT)}


def differing(config: DecoderConfig) -> list[str]:
    """The parameters of a model built on the meta device, sharded and initialized that differ from an unsharded one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = DecoderLM(config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    initialize(model, seed=3)
    whole = DecoderLM(config)
    initialize(whole, seed=3)
    wrong = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        if not torch.equal(parameter.full_tensor(), whole.get_parameter(name)):
            wrong.append(name)
    return wrong


def process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    report = [f"{name}: {wrong}" for name, config in configs().items() if (wrong := differing(config))]
    Path(folder, f"{rank}.txt").write_text("\n".join(report) or "equal", encoding="utf-8")
    dist.destroy_process_group()


def test_sharded_values_are_those_of_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(process, (port, str(tmp_path)), nprocs=2)
    assert [(tmp_path / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(2)] == ["equal", "equal"]
