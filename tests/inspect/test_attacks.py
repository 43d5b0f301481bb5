"""Hostile and clumsy uses of the inspection: models, states and options that nobody should have to think of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn

from normstream.cli import main
from normstream.inspect import anatomy_of, inspect_model, make_inputs, trace
from normstream.inspect.measures.attention_logits import attention_maxima
from normstream.inspect.measures.drop import layer_drops, sublayer_drops
from normstream.inspect.measures.gradients import gradient_norms
from normstream.inspect.measures.jacobian import jacobian_distances
from normstream.inspect.measures.lens import logit_lens
from normstream.inspect.measures.loss import loss_of
from normstream.inspect.report.wiring import wirings

WITH_LAYERS = (loss_of, attention_maxima, logit_lens, layer_drops, sublayer_drops, gradient_norms, jacobian_distances)
EVERYTHING = (trace, *WITH_LAYERS)
DIM, VOCAB = 16, 50


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down, self.dropout = nn.Linear(DIM, 32), nn.Linear(32, DIM), nn.Dropout(dropout)
        self.in_place = in_place

    def forward(self, h: Tensor) -> Tensor:
        h = self.add(h, self.attention(self.norm(h)))
        return self.add(h, self.dropout(self.down(self.up(self.norm_2(h)).relu())))

    def add(self, h: Tensor, update: Tensor) -> Tensor:
        return h.add_(update) if self.in_place else h + update

    def attention(self, z: Tensor) -> Tensor:
        scores = self.q(z) @ self.k(z).transpose(1, 2) / 4
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return self.o(scores.masked_fill(later, -torch.inf).softmax(-1) @ self.v(z))


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.embedding(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


@pytest.fixture(autouse=True)
def drawn() -> None:
    torch.manual_seed(0)


def state(model: nn.Module) -> dict[str, Any]:
    """All that a look at a model must leave as it was."""
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "objects": {name: (id(p), p.requires_grad, p.dtype) for name, p in model.named_parameters()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "modules": {
            name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
            for name, m in model.named_modules()
        },
        "random": torch.get_rng_state(),
        "mode": (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def prepared(change: Callable[[Model], Any], in_place: bool = False) -> Model:
    model = Model([Layer(in_place=in_place) for _ in range(2)]).eval()
    change(model)
    return model


def with_hooks(model: Model) -> None:
    model.layers[0].register_forward_hook(lambda module, args, output: output)
    model.layers[1].register_forward_pre_hook(lambda module, args: args)


def with_gradients(model: Model) -> None:
    model(torch.tensor([[1, 2, 3]])).sum().backward()


def partly_frozen(model: Model) -> None:
    model.embedding.requires_grad_(False)
    model.layers[0].get_submodule("norm").requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [with_hooks, with_gradients, partly_frozen, nn.Module.double, nn.Module.bfloat16],
    ids=lambda f: f.__name__,
)
def test_everything_about_the_model_is_as_it_was(change) -> None:
    model = prepared(change, in_place=change is not with_gradients)
    inputs = make_inputs(model)
    tokens = inputs["input_ids"].clone()
    before = state(model)
    anatomy = anatomy_of(model, inputs)
    assert anatomy.stacks[0].placement == "pre"
    for function in EVERYTHING:
        function(model, inputs, anatomy)
        assert same(state(model), before), function.__name__
    assert torch.equal(inputs["input_ids"], tokens)


def test_a_forward_that_fails_leaves_no_hooks() -> None:
    model = prepared(lambda model: None)
    anatomy, before = anatomy_of(model), state(model)
    for function in EVERYTHING:
        with pytest.raises(IndexError):
            function(model, {"input_ids": torch.tensor([[1, VOCAB]])}, anatomy)
        assert same(state(model), before), function.__name__


def test_training_mode_is_refused_where_dropout_would_be_measured() -> None:
    model = Model([Layer(dropout=0.5)])
    anatomy = anatomy_of(model)
    for function in EVERYTHING:
        with pytest.raises(ValueError, match="training mode"):
            function(model, make_inputs(model), anatomy)


def test_inference_mode_of_the_caller_does_not_matter() -> None:
    model = prepared(lambda model: None)
    inputs, anatomy = make_inputs(model), anatomy_of(model)
    expected = loss_of(model, inputs, anatomy), layer_drops(model, inputs, anatomy)
    with torch.inference_mode():
        assert (loss_of(model, inputs, anatomy), layer_drops(model, inputs, anatomy)) == expected
        assert gradient_norms(model, inputs, anatomy)[0].keys() == {("main", 0), ("main", 1)}


def test_the_anatomy_of_another_model_is_refused() -> None:
    model, larger = (Model([Layer() for _ in range(n)]).eval() for n in (1, 3))
    inputs, anatomy = make_inputs(model), anatomy_of(larger)
    for function in EVERYTHING:
        with pytest.raises(ValueError, match=r"layers\.[12]"):
            function(model, inputs, anatomy)
    for function in WITH_LAYERS:
        with pytest.raises(ValueError, match="give its anatomy"):
            function(model, inputs, None)


def test_a_model_without_layers_is_not_traced() -> None:
    model = Model([]).eval()
    anatomy = anatomy_of(model)
    assert "found none" in anatomy.notes[0]
    assert wirings(anatomy) == ()
    with pytest.raises(ValueError, match="no layers that were found"):
        trace(model, make_inputs(model), anatomy)


# The command


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = tiny_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def refused(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_folder_is_looked_at_first_and_appears_whole(llama: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty"):
        assert "exists already" in refused(["inspect", llama, "--out", tmp_path / name], capsys)
    monkeypatch.setattr("normstream.inspect.commands.write_report", stop)
    with pytest.raises(SystemExit):
        main(["inspect", str(llama), "--tokens", "3", "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "llama"]


def stop(*args: Any) -> None:
    raise KeyboardInterrupt


def test_texts_that_are_none(llama: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    said = refused(["inspect", llama, "--text-file", tmp_path / "latin.txt"], capsys)
    assert "latin.txt as a UTF-8 text" in said
    assert "nowhere.txt as a UTF-8 text" in refused(["inspect", llama, "--text-file", tmp_path / "nowhere.txt"], capsys)
    assert "the text is empty" in refused(["inspect", llama, "--text", " "], capsys)


def test_a_model_without_layers_has_a_report(tmp_path: Path, capsys) -> None:
    config = tiny_config("llama")
    config.architectures, config.num_hidden_layers = ["LlamaForCausalLM"], 0
    config.save_pretrained(tmp_path / "none")
    main(["inspect", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "report.html").is_file()
    assert "the places of norms are unknown" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_ones_own_is_inspected_without_a_loader() -> None:
    assert inspect_model(tiny_model("gemma2")).placement == {"main": "sandwich"}


@pytest.mark.untyped
def test_inputs_that_are_no_dictionary() -> None:
    tokens: Any = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="inputs must be a dictionary"):
        trace(tiny_model("gemma2"), tokens)
