"""What a model is loaded from, and what is refused before anything runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from normstream.checkpoints import load_source
from normstream.checkpoints.source import quiet_transformers
from normstream.models import DecoderConfig, DecoderLM
from normstream.training import TrainConfig, config_to_dict
from normstream.training.checkpoint import model_tensors, save_checkpoint

TOKENS = torch.arange(1, 14)[None]


def save(model: Any, folder: Path, **options: Any) -> Path:
    with quiet_transformers():
        model.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path / "llama")


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# What can be loaded


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "gpt2", "bert", "t5", "vit", "deepseek_v3"])
def test_folder_gives_the_saved_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    loaded = load_source(save(model, tmp_path / "model"))
    assert type(loaded.model) is type(model)
    assert (loaded.weights, loaded.is_ours, loaded.tokenizer, loaded.notes) == ("checkpoint", False, None, ())
    assert not loaded.model.training
    expected = model.state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_shards(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = save(model, tmp_path / "model", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(load_source(folder).model(TOKENS).logits, model(TOKENS).logits)


def test_dtype_and_attention(llama: Path) -> None:
    loaded = load_source(llama, dtype=torch.float64, attention="sdpa")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float64}
    assert loaded.config._attn_implementation == "sdpa"
    assert load_source(llama).config._attn_implementation == "eager"


def test_config_alone_draws_the_weights(llama: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (load_source(llama / "config.json", seed=seed).model for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first(TOKENS).logits, again(TOKENS).logits)
    assert not torch.equal(first(TOKENS).logits, other(TOKENS).logits)
    loaded = load_source(llama / "config.json")
    assert (loaded.weights, loaded.folder, type(loaded.model).__name__) == ("drawn", None, "LlamaForCausalLM")
    (llama / "model.safetensors").unlink()
    assert load_source(llama).weights == "drawn"


@pytest.mark.parametrize(("family", "head"), [("llama", "ForCausalLM"), ("bert", "ForMaskedLM"), ("vit", "ViTModel")])
def test_without_architecture_the_head_is_what_the_tensors_fill(tmp_path: Path, family: str, head: str) -> None:
    """A BERT or Llama has its language-model head; of a ViT with another head the bare model remains, and a note."""
    model: Any = tiny_model(family)
    folder = save(model, tmp_path / "model")
    change_config(folder, lambda config: config.pop("architectures"))
    if family == "vit":
        change_tensors(folder, lambda tensors: tensors.update(added_pooler(model.config.hidden_size)))
    loaded = load_source(folder)
    assert type(loaded.model).__name__.endswith(head)
    assert bool(loaded.notes) == (family == "vit")


def added_pooler(dim: int) -> dict[str, Tensor]:
    return {"vit.pooler.dense.weight": torch.zeros(dim, dim), "vit.pooler.dense.bias": torch.zeros(dim)}


def test_bare_model_of_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    model: Any = tiny_model("bert")
    folder = save(model, tmp_path / "model")
    change_config(folder, lambda config: config.update(architectures=["BertModel"]))
    change_tensors(folder, lambda tensors: tensors.update({f"bert.{k}": v for k, v in pooler(32).items()}))
    loaded = load_source(folder)
    assert type(loaded.model).__name__ == "BertModel"
    assert any("not part of BertModel: cls.predictions" in note for note in loaded.notes)


def pooler(dim: int) -> dict[str, Tensor]:
    return {"pooler.dense.weight": torch.zeros(dim, dim), "pooler.dense.bias": torch.zeros(dim)}


def test_tokenizer(llama: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(llama)
    assert load_source(llama).tokenizer("b a c")["input_ids"] == [1, 0, 2]
    (llama / "tokenizer.json").write_text("{")
    broken = load_source(llama)
    assert broken.tokenizer is None
    assert any("tokenizer cannot be loaded" in note for note in broken.notes)


def test_tokenizer_with_code_of_its_own_is_not_asked_about(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, transformers asks at the terminal whether the code may run."""
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (llama / "tokenizer_config.json").write_text(json.dumps(own))
    (llama / "vocab.txt").write_text("a")
    (llama / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    loaded = load_source(llama)
    assert loaded.tokenizer is None
    assert any("contains custom code" in note for note in loaded.notes)


def test_our_run_folder(tmp_path: Path) -> None:
    config = DecoderConfig(placement="siamese", vocab_size=64, n_layers=2, dim=16, n_heads=2, max_seq_len=128)
    model = DecoderLM(config)
    state = {
        "config": config_to_dict(TrainConfig(model=config)),
        "corpus_hash": "0",
        "metrics_bytes": 0,
        "scaler": None,
        "progress": {"step": 7},
    }
    save_checkpoint(tmp_path / "checkpoints", 7, model_tensors(model), {}, state, keep=1)
    loaded = load_source(tmp_path, dtype=torch.float64)
    assert (loaded.is_ours, loaded.weights, loaded.config.n_layers) == (True, "checkpoint", 2)
    assert loaded.tokenizer.vocab_size == 257
    assert torch.equal(loaded.model(TOKENS), model.double().eval()(TOKENS))


def test_hub_name_from_the_cache(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The layout of the hub's cache is part of its documented interface."""
    home = tmp_path / "hub" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    shutil.copytree(llama, home / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    loaded = load_source("org/tiny")
    assert torch.equal(loaded.model(TOKENS).logits, load_source(llama).model(TOKENS).logits)
    with pytest.raises(ValueError, match="org/tinny is no local folder, and the Hugging Face hub does not give it"):
        load_source("org/tinny")


# What cannot


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*/nowhere: expected a folder"):
        load_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_source(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="no model at"):
        load_source(tmp_path / "notes.txt")


@pytest.mark.untyped
def test_unknown_attention(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attention cannot be 'flash'"):
        load_source(tmp_path, attention="flash")  # type: ignore[arg-type]


def test_paths_are_not_asked_of_the_hub() -> None:
    for name in ("./model", "../model", "/model", "a/b/c"):
        with pytest.raises(ValueError, match="no model at"):
            load_source(name)


def test_cut_off_shard(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path / "model", max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{shard.name} is cut off: [\d,]+ bytes, its header says [\d,]+"):
        load_source(folder)


MISSING = {
    "llama": "model.layers.1.post_attention_layernorm.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
    "gpt2": "transformer.ln_f.bias",
    "t5": "decoder.block.0.layer.1.EncDecAttention.q.weight",
}


@pytest.mark.parametrize("family", MISSING)
def test_missing_tensor(tmp_path: Path, family: str) -> None:
    folder = save(tiny_model(family), tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors.pop(MISSING[family]))
    with pytest.raises(ValueError, match=rf"does not fit \w+: missing {MISSING[family]}$"):
        load_source(folder)


def test_tied_head_may_be_missing(tmp_path: Path) -> None:
    folder = save(tiny_model("gemma2"), tmp_path / "model")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_source(folder).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.9.input_layernorm.weight", (32,)), ("model.layers.0.self_attn.q_proj.bias", (32,)),
     ("model.norm.bias", (32,)), ("model.layers.0.mlp.extra.weight", (2, 2))],
)  # fmt: skip
def test_tensor_that_is_no_part_of_the_model(llama: Path, name: str, shape: tuple[int, ...]) -> None:
    change_tensors(llama, lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(ValueError, match=f"no place for {name}"):
        load_source(llama)


def test_wrong_shape(llama: Path) -> None:
    change_config(llama, lambda config: config.update(intermediate_size=40))
    with pytest.raises(ValueError, match=r"down_proj.weight is \(32, 48\) in the file and \(32, 40\) in the model"):
        load_source(llama)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_wrong_dtype(llama: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_tensors(llama, lambda tensors: tensors.update({name: torch.ones(32, 32).to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} has the dtype {str(dtype)[6:]}; expected float16"):
        load_source(llama)


def test_quantised(llama: Path) -> None:
    change_config(llama, lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
        load_source(llama)


def test_other_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "tf_model.h5")
    with pytest.raises(ValueError, match=r"has weights as tf_model\.h5 only"):
        load_source(llama)


def test_config_without_eps(llama: Path) -> None:
    change_config(llama, lambda config: config.pop("rms_norm_eps"))
    for source in (llama, llama / "config.json"):
        with pytest.raises(ValueError, match=r"no eps for its norms: expected rms_norm_eps.*silently take 1e-06"):
            load_source(source)


def test_eps_under_another_name(tmp_path: Path) -> None:
    """GPT-2's config knows layer_norm_epsilon only; OLMo's first version has a fixed eps and no such key."""
    folder = save(tiny_model("gpt2"), tmp_path / "gpt2")
    change_config(folder, lambda config: config.update(layer_norm_eps=config.pop("layer_norm_epsilon")))
    with pytest.raises(ValueError, match="expected layer_norm_epsilon"):
        load_source(folder)
    assert load_source(save(tiny_model("olmo"), tmp_path / "olmo")).weights == "checkpoint"


def test_model_type(llama: Path) -> None:
    change_config(llama, lambda config: config.pop("model_type"))
    assert load_source(llama).notes == ("config.json has no model_type; taken as llama",)
    change_config(llama, lambda config: config.pop("architectures"))
    with pytest.raises(ValueError, match="has no model_type"):
        load_source(llama)
    assert type(load_source(llama, model_type="llama").model).__name__ == "LlamaForCausalLM"
    with pytest.raises(ValueError, match=r"unknown model_type 'lama'; did you mean 'llama'\?"):
        load_source(llama, model_type="lama")
    change_config(llama, lambda config: config.update(model_type="llama"))
    with pytest.raises(ValueError, match="says model_type 'llama', not 'bert'"):
        load_source(llama, model_type="bert")


def test_config_that_is_not_valid(llama: Path) -> None:
    change_config(llama, lambda config: config.update(hidden_size="wide"))
    with pytest.raises(ValueError, match=r"config\.json is no valid config of a llama"):
        load_source(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        load_source(llama)


def test_code_of_a_checkpoint_does_not_run(llama: Path) -> None:
    proof = llama / "proof"
    (llama / "modeling_evil.py").write_text(f"open({str(proof)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    change_config(llama, lambda config: config.update(model_type="evil", auto_map=auto_map))
    with pytest.raises(ValueError, match="'evil' comes with its own code; it runs only with --trust-remote-code"):
        load_source(llama)
    change_config(llama, lambda config: config.update(model_type="llama"))
    assert type(load_source(llama).model).__name__ == "LlamaForCausalLM"
    assert not proof.exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_if_it_is_asked_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(llama / "cache"))
    monkeypatch.syspath_prepend(str(llama / "cache"))
    expected = load_source(llama).model(TOKENS).logits
    (llama / "modeling_own.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    change_config(llama, lambda config: config.update(model_type="own", auto_map=auto_map))
    loaded = load_source(llama, trust_remote_code=True)
    assert type(loaded.model).__name__ == "Own"
    assert torch.equal(loaded.model(TOKENS).logits, expected)


def test_malicious_bin(llama: Path) -> None:
    proof = llama / "proof"

    class Attack:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (proof,)

    (llama / "model.safetensors").unlink()
    torch.save({"a": Attack()}, llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match="nothing of it was run"):
        load_source(llama)
    assert not proof.exists()


def test_transformers_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'normstream\[hf\]'"):
        load_source(llama)
