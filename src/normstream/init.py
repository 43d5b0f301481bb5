"""Initialization: one table of schemes, the same values on every device and for every placement with that scheme.

============== =============== ================== ================ ================== ================ =======
scheme         embedding, head q, k, any other    v                o, ffn out         ffn in           drawn
============== =============== ================== ================ ================== ================ =======
plain          std             std                std              std                std              normal
gpt2           std             std                std              std / sqrt(2L)     std              normal
megatron_full  std             std                std              std / sqrt(2L)     std              cut
mitchell       1 / sqrt(D)     1 / sqrt(D)        1 / sqrt(D)      1 / sqrt(2 l in)   1 / sqrt(D)      cut
xavier         1 / sqrt(D)     X                  X                X                  X                normal
deepnorm       1 / sqrt(D)     X                  beta X           beta X             beta X           normal
deepnorm_code  1 / sqrt(D)     T                  beta' T          beta' T            beta' T          uniform
sub_ln         1 / sqrt(D)     X                  gamma X          gamma X            gamma X          normal
sub_ln_code    1 / sqrt(D)     T                  gamma T          gamma T            gamma T          uniform
ngpt           1 / sqrt(D)     1 / sqrt(D)        1 / sqrt(D)      1 / sqrt(2L D)     1 / sqrt(D)      normal
============== =============== ================== ================ ================== ================ =======

Standard deviations: std is ``init_std``, by default sqrt(2 / (5 D)), D the width, L the number of blocks, l the block
counted from 1, X = sqrt(2 / (in + out)) Xavier's, T = sqrt(1 / (3 in)) that of a torch Linear. beta and gamma are
functions of the depth in ``placements.deepnorm`` and ``placements.sub_ln``, beta' the released code's; gamma is 1 in
cross-attention. cut is a normal distribution cut at 3 std; uniform concerns the matrices of the sublayers and
then their biases too. All other biases start at 0, norms at their ``gain_init``; learned positions start as the
embedding, under gpt2 at half its std. Under every scheme adaLN-zero and the output of a DiT start at 0 and its labels
at std 1 (``models.roles``). The placement nGPT then norms every matrix, which leaves only its direction.

in and out are the sizes of a *logical* matrix: keys and values that share one weight (latent attention) are drawn
apart, and with grouped queries out is the number of rows that there are.

Every parameter has a random generator of its own, seeded by the seed and the parameter's name: its values depend on
nothing else, so two placements with one scheme start with equal sublayers, and a model built on the meta device or
sharded over processes gets the values that it would have had on one CPU.

Sources: docs/initialization.md.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normstream.layers import LatentAttention
from normstream.layers.expert_linear import ExpertLinear
from normstream.models import build_model, trunks
from normstream.models.roles import StartRole
from normstream.placements import InitScheme, Placement, Stack, get
from normstream.placements.deepnorm import beta
from normstream.placements.sub_ln import gamma

Draw = Literal["normal", "cut", "uniform"]
Matrices = nn.Linear | nn.Embedding | ExpertLinear
Part = tuple[StartRole, Tensor]


@dataclass(frozen=True)
class Matrix:
    """A logical matrix: what its start may depend on.

    >>> round(Matrix("query_key", fan_in=512, fan_out=512, dim=512, n_layers=12).std("deepnorm"), 7)
    0.0441942
    """

    role: StartRole
    """vocabulary: embedding or head; output: writes to the streams; query_key: those two and any other matrix; zero:
    starts at 0, unit with standard deviation 1, under every scheme."""
    fan_in: int
    """Number of inputs."""
    fan_out: int
    """Number of outputs."""
    dim: int
    """Width of the residual streams."""
    n_layers: int
    """Number of blocks in its stack."""
    layer: int = 0
    """0-based block."""
    init_std: float = 0.02
    """The configuration's standard deviation."""
    stack: Stack = field(default_factory=Stack)
    """Which stack of the model it is in."""
    cross: bool = False
    """Whether it belongs to cross-attention."""

    def std(self, scheme: InitScheme) -> float:
        """Its standard deviation at the start."""
        fixed = {"zero": 0.0, "unit": 1.0}
        return fixed[self.role] if self.role in fixed else getattr(SCHEMES[scheme], self.role)(self)


# The entries of the table above, by the names that SCHEMES has for them.
def std(m: Matrix) -> float:
    """The configuration's ``init_std``."""
    return m.init_std


def half_std(m: Matrix) -> float:
    """Half of it."""
    return m.init_std / 2


def std_depth(m: Matrix) -> float:
    """``init_std / sqrt(2L)``."""
    return m.init_std / math.sqrt(2 * m.n_layers)


def width(m: Matrix) -> float:
    """``1 / sqrt(D)``."""
    return 1 / math.sqrt(m.dim)


def width_depth(m: Matrix) -> float:
    """``1 / sqrt(2L D)``."""
    return 1 / math.sqrt(2 * m.n_layers * m.dim)


def fan_layer(m: Matrix) -> float:
    """``1 / sqrt(2 l in)``, l counted from 1."""
    return 1 / math.sqrt(2 * (m.layer + 1) * m.fan_in)


def xavier(m: Matrix) -> float:
    """``sqrt(2 / (in + out))``."""
    return math.sqrt(2 / (m.fan_in + m.fan_out))


def torch_std(m: Matrix) -> float:
    """``1 / sqrt(3 in)``, that of a torch Linear."""
    return 1 / math.sqrt(3 * m.fan_in)


def beta_xavier(m: Matrix) -> float:
    """DeepNorm's beta times Xavier's."""
    return beta(m.stack, m.n_layers) * xavier(m)


def beta_torch(m: Matrix) -> float:
    """The released code's beta times torch's."""
    return beta(m.stack, m.n_layers, "code") * torch_std(m)


def gamma_xavier(m: Matrix) -> float:
    """Sub-LN's gamma times Xavier's."""
    return (1.0 if m.cross else gamma(m.stack, m.n_layers)) * xavier(m)


def gamma_torch(m: Matrix) -> float:
    """Sub-LN's gamma times torch's."""
    return (1.0 if m.cross else gamma(m.stack, m.n_layers)) * torch_std(m)


Rule = Callable[[Matrix], float]


class Scheme(NamedTuple):
    """One row of the table: the standard deviation of each role, and how values are drawn."""

    vocabulary: Rule
    positions: Rule
    query_key: Rule
    value: Rule
    output: Rule
    ffn_in: Rule
    draw: Draw


# fmt: off
SCHEMES: dict[InitScheme, Scheme] = {
    #                       vocab. positions q and k    value         o, ffn out    ffn in        drawn
    "plain":         Scheme(std,   std,      std,       std,          std,          std,          "normal"),
    "gpt2":          Scheme(std,   half_std, std,       std,          std_depth,    std,          "normal"),
    "megatron_full": Scheme(std,   std,      std,       std,          std_depth,    std,          "cut"),
    "mitchell":      Scheme(width, width,    width,     width,        fan_layer,    width,        "cut"),
    "xavier":        Scheme(width, width,    xavier,    xavier,       xavier,       xavier,       "normal"),
    "deepnorm":      Scheme(width, width,    xavier,    beta_xavier,  beta_xavier,  beta_xavier,  "normal"),
    "deepnorm_code": Scheme(width, width,    torch_std, beta_torch,   beta_torch,   beta_torch,   "uniform"),
    "sub_ln":        Scheme(width, width,    xavier,    gamma_xavier, gamma_xavier, gamma_xavier, "normal"),
    "sub_ln_code":   Scheme(width, width,    torch_std, gamma_torch,  gamma_torch,  gamma_torch,  "uniform"),
    "ngpt":          Scheme(width, width,    width,     width,        width_depth,  width,        "normal"),
}
# fmt: on


class Block(NamedTuple):
    """Some rows of a weight that form one logical matrix, and the scheme that they start by."""

    scheme: InitScheme
    matrix: Matrix
    rows: Tensor


@torch.no_grad()
def initialize(model: Any, seed: int) -> None:
    """Sets every parameter of a model of any kind by its scheme, in place.

    The scheme is that of ``model.config.init`` or, block by block, of the placement.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2))
    >>> initialize(model, seed=0)
    >>> round(model.tok_embeddings.weight.std().item() / (2 / (5 * 8)) ** 0.5, 1)
    1.0
    """
    model.tie()
    blocks, done = logical_blocks(model), set[Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, Matrices):
            if module.weight not in done:  # a tied one is set under its first name
                _set(module.weight, _draw(module.weight.shape, blocks[module], f"{seed}:{name}.weight"))
                done.add(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                _start_bias(module.bias, blocks[module], f"{seed}:{name}.bias")
        elif hasattr(module, "reset_parameters"):
            _reset(module)
    _after_step(model, seed)


def logical_blocks(model: Any) -> dict[Matrices, list[Block]]:
    """For each Linear, Embedding and set of experts of the model its rows, logical matrix by logical matrix.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2))
    >>> logical_blocks(model)[model.layers[0].attention.wv][0].matrix.role
    'value'
    """
    config = model.config

    def blocks_of(module: Matrices, parts: list[Part], placement: Placement, **place: Any) -> list[Block]:
        scheme = placement.init if config.init == "placement" else config.init
        *_, n_rows, fan_in = module.weight.shape
        sizes = {"dim": config.dim, "init_std": config.resolved_init_std}
        fans_out = [n_rows if isinstance(module, ExpertLinear) else len(rows) for _, rows in parts]
        return [
            Block(scheme, Matrix(role, fan_in, fan_out, **sizes, **place), rows)
            for (role, rows), fan_out in zip(parts, fans_out, strict=True)
        ]

    placement, roles, stacks = get(config.placement), model.start_roles(), list(trunks(model).values())
    outside = {"n_layers": len(stacks[0].layers), "stack": stacks[0].stack}
    blocks = {
        module: blocks_of(module, [(roles.get(module, "query_key"), _all_rows(module))], placement, **outside)
        for module in model.modules()
        if isinstance(module, Matrices)
    }
    for trunk in stacks:
        for index, layer in enumerate(trunk.layers):
            for owner, name, module, cross in _matrices(layer):
                place = {"layer": index, "cross": cross, "n_layers": len(trunk.layers), "stack": trunk.stack}
                blocks[module] = blocks_of(module, _parts(owner, name, module), placement.at(index), **place)
    return blocks


def _all_rows(module: Matrices) -> Tensor:
    return torch.arange(module.weight.shape[0], device="cpu")


def _matrices(layer: Any) -> Iterator[tuple[nn.Module, str, Matrices, bool]]:
    """The matrices in a block's sublayers: their owner, their name there, and whether it is cross-attention."""
    for path, owner in layer.named_modules():
        if hasattr(owner, "branch_outputs"):
            for name, module in owner.named_children():
                if isinstance(module, Matrices):
                    yield owner, name, module, "cross_attention" in path.split(".")


def _parts(owner: nn.Module, name: str, module: Matrices) -> list[Part]:
    """The logical matrices in one of a sublayer's matrices, each with its rows."""
    rows = _all_rows(module)
    if isinstance(owner, LatentAttention):
        sizes = owner.sizes
        if name == "wkv_up":
            of_value = rows % (sizes.nope_head_dim + sizes.v_head_dim) >= sizes.nope_head_dim
            return [("query_key", rows[~of_value]), ("value", rows[of_value])]
        if name == "wkv_down":
            return [("query_key", rows[: sizes.kv_rank]), ("query_key", rows[sizes.kv_rank :])]
    roles: dict[str, StartRole] = {name: "zero" for name in getattr(owner, "zero_matrices", ())}
    roles |= {name: "output" for name in getattr(owner, "branch_outputs", ())}
    if name in roles:
        return [(roles[name], rows)]
    values: tuple[str, ...] | None = getattr(owner, "value_matrices", None)
    if values is None:
        return [("ffn_in", rows)]
    return [("value" if name in values else "query_key", rows)]


def _draw(shape: torch.Size, blocks: list[Block], stream: str) -> Tensor:
    """Values of a weight or bias, each logical matrix by its own rule, from a generator seeded by ``stream``."""
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    for scheme, matrix, rows in blocks:
        std, draw = matrix.std(scheme), SCHEMES[scheme].draw
        part = torch.empty(len(rows), *shape[1:], dtype=torch.float32, device="cpu")
        if matrix.role == "zero":
            part.zero_()
        elif draw == "cut":
            nn.init.trunc_normal_(part, 0.0, std, -3 * std, 3 * std, generator=generator)
        elif draw == "uniform" and matrix.role not in ("vocabulary", "positions", "unit"):
            part.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)
        else:
            part.normal_(0.0, std, generator=generator)
        values[rows] = part
    return values


def _start_bias(bias: Tensor, blocks: list[Block], stream: str) -> None:
    """Uniform like the weight where torch's own start of a Linear is wanted, else 0."""
    scheme, matrix, _ = blocks[0]
    if SCHEMES[scheme].draw == "uniform" and matrix.role not in ("vocabulary", "zero"):
        _set(bias, _draw(bias.shape, blocks, stream))
    else:
        bias.zero_()


def _reset(module: Any) -> None:
    """``module.reset_parameters()``; of sharded parameters on a copy that has all of them."""
    sharded = {name: p for name, p in module.named_parameters(recurse=False) if _is_sharded(p)}
    if not sharded:
        module.reset_parameters()
        return
    whole = copy.copy(module)
    whole._parameters = {
        name: p if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"))
        for name, p in module._parameters.items()
    }
    whole.reset_parameters()
    for name, parameter in sharded.items():
        _set(parameter, getattr(whole, name))


def _after_step(model: Any, seed: int) -> None:
    """The placement's hook; with shards on a whole model, since sums over shards round differently."""
    placement = get(model.config.placement)
    has_hook = type(placement).after_step is not Placement.after_step
    if has_hook and any(map(_is_sharded, model.parameters())):
        whole = build_model(model.config)
        initialize(whole, seed)
        for name, parameter in model.named_parameters():
            _set(parameter, whole.get_parameter(name))
    else:
        placement.after_step(model)


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "device_mesh")


def _set(parameter: Any, values: Tensor) -> None:
    """Copies values into a parameter, of which this process may hold a shard; every process has all values."""
    if _is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor  # half a second that few programs need

        mesh, placements = parameter.device_mesh, parameter.placements
        values = distribute_tensor(values.to(parameter.dtype), mesh, placements, src_data_rank=None)
    parameter.copy_(values)
