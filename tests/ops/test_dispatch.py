"""Which code runs: the fused operation wherever there is one, the join's and read's own code wherever there is not."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_program import (
    Case,
    case_of,
    derive,
    errors,
    given,
    in_float64,
    incoming_of,
    junctions_of,
    plain_of,
    row_program,
    run_counted,
)
from torch import Tensor, nn

from normstream import placements
from normstream.junctions import Drop, Junction, PreNormJoin, PreNormRead, State, set_backend
from normstream.norms import DyT, LayerNorm, NormConfig, RMSNorm
from normstream.ops import status

# By hand, for two blocks: the first junction, the one after each sublayer. f: fused, p: the plain code.
# Not fused: a start without a norm, a sum that nothing norms, other kinds of streams, norms on both sides of a stream.
FUSED = {
    "pre": "pffff",
    "pre(embedding_norm=true)": "fffff",
    "pre(residual_scale=true)": "ppppp",
    "gpt2": "pffff",
    "bloom": "fffff",
    "bloom(residual_from_norm=true)": "ppppf",
    "post": "pffff",
    "realformer": "pffff",
    "deepnorm": "pffff",
    "deepnorm(base=pre)": "pffff",
    "layernorm_scaling": "pffff",
    "mix_ln": "pffff",
    "mix_ln(alpha=0.5)": "pffff",
    "sandwich": "pffff",
    "sandwich(pb_relax=token)": "ppppp",
    "peri": "fffff",
    "gemma2": "pffff",
    "gemma3": "pffff",
    "glm4": "pffff",
    "olmo2": "pffff",
    "swin_v2": "fffff",
    "swin_v2(extra_norm_every=1)": "fffff",
    "parallel": "pff",
    "hybridnorm": "pfpff",
    "hybridnorm_star": "pfpff",
    "normformer": "pfpfp",
    "sub_ln": "pffff",
    "keel": "pffff",
    "residual": "pfffp",
    "span_norm": "ppfpf",
    "geo_norm": "fpppp",
    "ngpt": "ppppp",
    "hyper_connections": "ppppp",
    "mhc": "ppppp",
    "siamese": "fffff",
    "siamese(pair=pre-pre)": "ppppp",
    "siamese(pair=post-post)": "ppppp",
    "siamese(input_norm=false,embedding_norm=false,read_out=paper)": "fffff",
    "siamese_hybrid_pre": "fffff",
    "siamese_hybrid_pre(first_block=pre)": "ppfff",
    "siamese_depth_attention": "fffff",
    "siamese_hyper_connections": "ppppp",
    "post:0,pre:1-": "pffff",
}


def test_every_placement_is_in_the_table() -> None:
    assert set(placements.names()) <= set(FUSED)


@pytest.mark.parametrize("spec", FUSED)
def test_where_the_fused_operation_runs(spec: str) -> None:
    """Through a whole row, whose streams and last z are those of the plain code."""
    row = junctions_of(spec, 8)
    embedding = torch.randn(2, 3, 8)

    def run() -> tuple[str, list[Tensor]]:
        ran, state, z = "", (), embedding
        for junction in row:
            (state, z), n = run_counted(lambda j=junction, s=state, z=z: j(s, torch.sin(z)))
            ran += "pf"[n]
        return ran, [*state, z]

    ran, fused = run()
    assert ran == FUSED[spec]
    for junction in row:
        set_backend(junction, "plain")
    ran, plain = run()
    assert ran == "p" * len(row)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_there_is_a_compiler() -> None:
    """Where g++ is, nothing falls back."""
    subprocess.run(["g++", "--version"], check=True, capture_output=True)
    assert status()["cpp"] == "compiled for the CPU"


# --- what the fused operation does not do -----------------------------------------------------------------------------


def plain_runs(case: Case) -> None:
    """The plain code runs, whether it is asked for or not, and its numbers are the formula's."""
    incoming = incoming_of(case)
    ours, n = run_counted(lambda: derive(case, incoming))
    assert n == 0
    for a, b in zip(ours, derive(plain_of(case), incoming), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_float64_streams_or_updates() -> None:
    case = case_of("siamese", 2)
    exact = in_float64(case)
    plain_runs(exact)
    plain_runs(case._replace(state=exact.state))
    incoming = incoming_of(exact)
    for a, b in zip(derive(exact, incoming), derive(exact, incoming, row_program), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_streams_of_another_shape_than_the_update() -> None:
    case = case_of("siamese", 2, (2, 3, 8))
    plain_runs(case._replace(state=(case.state[0][:1], case.state[1])))


def test_dtypes_of_their_own_for_each_stream() -> None:
    case = case_of("siamese", 2)
    plain_runs(case._replace(state=(case.state[0], case.state[1].bfloat16())))


@pytest.mark.parametrize("kind", ["dyt", "derf", "scale", "pb_relax"])
def test_norms_of_another_class(kind: str) -> None:
    plain_runs(case_of("siamese", 2, kind=kind))
    plain_runs(case_of("pre", 1, kind=kind))


def test_a_subclass_of_a_norm() -> None:
    class Doubled(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    case = case_of("pre", 1, (5, 8))
    plain: Any = case.junction.read
    once = case.junction(case.state, case.update)[1]
    norm = Doubled(8, eps=plain.norm.eps)
    norm.load_state_dict(plain.norm.state_dict())
    doubled = Junction(case.junction.join, PreNormRead(norm))
    (_, z), n = run_counted(lambda: doubled(case.state, case.update))
    assert n == 0
    torch.testing.assert_close(z, 2 * once)


class Negated(PreNormRead):
    """Another equation, with the description of the one that it comes from."""

    def forward(self, state: State) -> tuple[State, Tensor]:
        return state, -super().forward(state)[1]


class Renamed(PreNormRead):
    """The same equation and description under another name."""


def test_a_subclass_that_changes_the_equation_alone() -> None:
    norm = RMSNorm(8, eps=1e-5)
    state, update = (torch.randn(2, 8),), torch.randn(2, 8)
    (_, z), n = run_counted(lambda: Junction(PreNormJoin(Drop()), PreNormRead(norm))(state, update))
    assert n == 1
    (_, negated), n = run_counted(lambda: Junction(PreNormJoin(Drop()), Negated(norm))(state, update))
    assert n == 0
    torch.testing.assert_close(negated, -z)
    (_, same), n = run_counted(lambda: Junction(PreNormJoin(Drop()), Renamed(norm))(state, update))
    assert n == 1
    assert torch.equal(same, z)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, seen: module.register_forward_hook(seen),
    "forward pre": lambda module, seen: module.register_forward_pre_hook(seen),
    "backward": lambda module, seen: module.register_full_backward_hook(seen),
    "backward pre": lambda module, seen: module.register_full_backward_pre_hook(seen),
}
HOOKS_ON_ALL: dict[str, Callable[[Callable[..., None]], Any]] = {
    "forward": nn.modules.module.register_module_forward_hook,
    "forward pre": nn.modules.module.register_module_forward_pre_hook,
}


def hooked(case: Case, register: Callable[[Callable[..., None]], Any]) -> list[nn.Module]:
    """The modules that the hook saw; while it is there the plain code runs, afterwards the fused operation again."""
    seen: list[nn.Module] = []
    handle = register(lambda module, *_: seen.append(module))
    state, update = tuple(s.requires_grad_() for s in case.state), case.update.requires_grad_()
    try:
        (_, z), n = run_counted(lambda: case.junction(state, update))
        z.sum().backward()
    finally:
        handle.remove()
    assert n == 0
    assert run_counted(lambda: case.junction(state, update))[1] == 1
    return seen


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_called(hook: str) -> None:
    for where in ("join.norm_x", "read.norm_y", "read.norm_in", *(("join", "read") if "forward" in hook else ())):
        case = case_of("siamese", 2, (2, 3, 8))
        module = case.junction.get_submodule(where)
        assert module in hooked(case, lambda seen, m=module: HOOKS[hook](m, seen)), where


@pytest.mark.parametrize("hook", HOOKS_ON_ALL)
def test_hooks_on_all_modules_are_called(hook: str) -> None:
    case = case_of("siamese", 2, (2, 3, 8))
    assert case.junction.get_submodule("read.norm_in") in hooked(case, HOOKS_ON_ALL[hook])


def test_a_hook_on_the_junction_itself_changes_nothing() -> None:
    case, seen = case_of("siamese", 2), []
    case.junction.register_forward_hook(lambda *_: seen.append(1))
    assert run_counted(lambda: case.junction(case.state, case.update))[1] == 1
    assert seen == [1]


def test_a_forward_that_was_replaced() -> None:
    """Libraries that move weights in and out of memory replace a module's forward instead of hooking it."""
    for where in ("join", "read", "read.norm_in"):
        case, seen = case_of("siamese", 2), []
        module: Any = case.junction.get_submodule(where)
        original = module.forward
        module.forward = lambda *given, f=original, seen=seen: seen.append(1) or f(*given)
        assert run_counted(lambda c=case: c.junction(c.state, c.update))[1] == 0, where
        assert seen == [1]


@pytest.mark.parametrize(("spec", "n"), [("pre", 0), ("pre", 2), ("siamese", 0), ("siamese", 1), ("siamese", 3)])
def test_a_state_of_another_number_of_streams(spec: str, n: int) -> None:
    """An error, as with the plain code: neither a first junction nor one that forgets a stream."""
    case = case_of(spec, 1)
    with pytest.raises(ValueError, match=r"unpack|streams"):
        case.junction((case.update,) * n, case.update)


def test_a_parametrized_norm() -> None:
    class Positive(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.abs()

    case = case_of("siamese", 2)
    nn.utils.parametrize.register_parametrization(case.junction.get_submodule("read.norm_in"), "weight", Positive())
    plain_runs(case)


# --- other derivatives ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_transforms_of_torch_func() -> None:
    """vmap, grad, jvp and jacrev take the plain code; they agree with autograd through the fused operation."""
    case = case_of("siamese", 2, (3, 8))
    direction, incoming = torch.randn(3, 8), torch.randn(3, 8)
    _, (d_update, *_) = derive(case, [None, None, incoming])

    def loss(update: Tensor) -> Tensor:
        return (case.junction(case.state, update)[1] * incoming).sum()

    (_, jvp), n = run_counted(
        lambda: torch.func.jvp(lambda u: case.junction(case.state, u)[1], (case.update,), (direction,))
    )
    assert n == 0
    torch.testing.assert_close((jvp * incoming).sum(), (d_update * direction).sum())
    gradient, n = run_counted(lambda: torch.func.grad(loss)(case.update))
    assert n == 0
    torch.testing.assert_close(gradient, d_update)
    jacobian, n = run_counted(lambda: torch.func.jacrev(lambda u: case.junction(case.state, u)[1])(case.update))
    assert n == 0
    torch.testing.assert_close(torch.einsum("tdsc,td->sc", jacobian, incoming), d_update)
    z, n = run_counted(
        lambda: torch.func.vmap(lambda x, y, u: case.junction((x, y), u)[1])(
            *(t[:, None] for t in (*case.state, case.update))
        )
    )
    assert n == 0
    torch.testing.assert_close(z[:, 0], case.junction(case.state, case.update)[1])
    assert run_counted(lambda: case.junction(case.state, case.update))[1] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode() -> None:
    case = case_of("pre", 1, (3, 8))
    tangent = torch.randn(3, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(case.update, tangent)
        (_, z), n = run_counted(lambda: case.junction(case.state, dual))
        derivative = torch.autograd.forward_ad.unpack_dual(z).tangent
    assert n == 0
    incoming = torch.randn(3, 8)
    _, (d_update, *_) = derive(case, [None, incoming])
    assert derivative is not None
    torch.testing.assert_close((derivative * incoming).sum(), (d_update * tangent).sum())


def test_a_second_derivative_says_what_to_do() -> None:
    case = case_of("siamese", 2)
    update = case.update.requires_grad_()

    def second() -> Tensor:
        z = case.junction(case.state, update)[1]
        (gradient,) = torch.autograd.grad(z.square().sum(), update, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), update)[0]

    with pytest.raises(NotImplementedError, match=r"once.*normstream\.junctions\.set_backend\(model, 'plain'\)"):
        second()
    set_backend(case.junction, "plain")
    assert second().isfinite().all()


@pytest.mark.parametrize(("placement", "stream"), [("pre", 0), ("siamese", 1)])
def test_a_stream_that_is_changed_in_place_is_not_taken_for_what_was_kept(placement: str, stream: int) -> None:
    junction = placements.get(placement).junctions(8, 1)[1]
    update = torch.randn(3, 8, requires_grad=True)
    state, z = junction(tuple(torch.randn(3, 8) for _ in range(stream + 1)), update)
    state[stream].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_in_place_changes_of_what_a_junction_gives() -> None:
    """A sublayer may overwrite its input, as with ReLU(inplace=True), where the plain code allows it."""
    case = case_of("pre", 1, (3, 8))
    incoming = torch.randn(3, 8)

    def loss(junction: Junction) -> Tensor:
        z = junction(case.state, case.update.requires_grad_())[1]
        return torch.autograd.grad((z.mul_(2) * incoming).sum(), case.update)[0]

    torch.testing.assert_close(loss(case.junction), loss(plain_of(case).junction))


def test_no_gradient_is_asked_for() -> None:
    case = case_of("siamese", 2)
    wanted = [
        t.detach() for t in (*case.junction(case.state, case.update)[0], case.junction(case.state, case.update)[1])
    ]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            (streams, z), n = run_counted(lambda: case.junction(case.state, case.update))
        assert n == 1
        assert not z.requires_grad
        assert all(map(torch.equal, (*streams, z), wanted))
    for parameter in case.junction.parameters():
        parameter.requires_grad_(False)
    assert max(errors(case, incoming_of(case))[0]) <= 2e-6


# --- names of backends ------------------------------------------------------------------------------------------------


@pytest.mark.untyped
def test_an_unknown_backend() -> None:
    case = case_of("siamese", 2)
    with pytest.raises(ValueError, match=r"did you mean 'triton'.*auto, plain, cpp, triton"):
        set_backend(case.junction, "tritn")  # pyright: ignore[reportArgumentType]
    assert case.junction.backend == "auto"
    case.junction.backend = "cp"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="did you mean 'cpp'"):
        case.junction(case.state, case.update)


def test_a_backend_that_this_device_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = case_of("siamese", 2)
    set_backend(case.junction, "triton")
    with pytest.raises(ValueError, match=r"triton.*cpu.*auto or plain"):
        case.junction(case.state, case.update)
    set_backend(case.junction, "cpp")
    assert run_counted(lambda: case.junction(case.state, case.update))[1] == 1


def test_set_backend_reaches_every_junction() -> None:
    model = nn.ModuleDict({"row": nn.ModuleList(placements.get("siamese").junctions(8, 2, norm=NormConfig()))})
    set_backend(model, "plain")
    assert {m.backend for m in model.modules() if isinstance(m, Junction)} == {"plain"}
    assert Junction.backend == "auto"


def test_norms_of_other_libraries_are_left_alone() -> None:
    """Also torch's own, whose conventions are not looked at."""
    for norm in (nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8), DyT(8, alpha=0.5), nn.Identity()):
        plain_runs(given("pre", Junction(PreNormJoin(Drop()), PreNormRead(norm)), 1, (3, 8)))
    assert (
        run_counted(
            lambda: Junction(PreNormJoin(Drop()), PreNormRead(LayerNorm(8, eps=1e-5)))(
                (torch.ones(1, 8),), torch.ones(1, 8)
            )
        )[1]
        == 1
    )
