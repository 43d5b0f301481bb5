"""Sharded parameters and activations, in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from row_program import case_of

from normstream.init import initialize
from normstream.models import DecoderConfig, DecoderLM
from normstream.ops import calls

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its distributed tensors
]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fully_sharded_layers_run_fused(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = DecoderLM(DecoderConfig(placement="siamese", vocab_size=11, dim=16, n_layers=2, n_heads=2))
    initialize(model, seed=0)
    tokens = torch.arange(12).view(2, 6) % 11
    model(tokens).logsumexp(-1).mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = calls.copy()
    model(tokens).logsumexp(-1).mean().backward()
    assert calls - before == {"cpp junction": 5, "cpp junction_backward": 5}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name])


def test_sharded_activations_run_the_plain_code(mesh: Any) -> None:
    """As in sequence parallelism: the operation knows nothing of tensors that are parts of others."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    case = case_of("pre", 1, (4, 16))
    wanted = case.junction(case.state, case.update)[1]
    junction = distribute_module(case.junction, mesh)
    x, o = (distribute_tensor(t, mesh, [Shard(0)]) for t in (*case.state, case.update))
    before = calls.copy()
    z: Any = junction((x,), o)[1]
    assert calls == before
    torch.testing.assert_close(z.full_tensor(), wanted)
