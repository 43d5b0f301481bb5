"""The released DiT with SiameseNorm: our whole model against its output, hidden states and gradients."""

import pytest

from normstream.models import DiT, DiTConfig

CONFIG = DiTConfig(
    placement="siamese",
    image_size=6,
    channels=3,
    patch_size=2,
    dim=32,
    n_layers=3,
    n_heads=4,
    ffn_dim=64,
    n_classes=5,
    label_dropout=0.1,
    learned_sigma=True,
    positions="learned",  # the golden file has random numbers in the table that is fixed otherwise
)


def names() -> dict[str, str]:
    """Our parameters to the official ones."""
    found = {
        "patch_embeddings.projection.weight": "x_embedder.proj.weight.flat",
        "patch_embeddings.projection.bias": "x_embedder.proj.bias",
        "pos_embeddings.weight": "pos_embed",
        "label_embeddings.weight": "y_embedder.embedding_table.weight",
    }
    for part in ("weight", "bias"):
        found |= {
            f"time_embeddings.w_in.{part}": f"t_embedder.mlp.0.{part}",
            f"time_embeddings.w_out.{part}": f"t_embedder.mlp.2.{part}",
            f"final_modulation.{part}": f"final_layer.adaLN_modulation.1.{part}",
            f"output.{part}": f"final_layer.linear.{part}",
            f"after_layers.join.norm_x.{part}": f"postnorm.{part}",
            f"after_layers.read.norm_y.{part}": f"prenorm.{part}",
        }
        for i in range(3):
            ours, official = f"layers.{i}", f"blocks.{i}"
            for place, (name, rows) in enumerate({"attention": "[0:96]", "feed_forward": "[96:192]"}.items()):
                found |= {
                    f"{ours}.{name}.modulation.{part}": f"{official}.adaLN_modulation.1.{part}{rows}",
                    f"{ours}.before_{name}.join.norm_x.{part}": f"{official}.postnorm{place + 1}.{part}",
                    f"{ours}.before_{name}.read.norm_y.{part}": f"{official}.prenorm{place + 1}.{part}",
                }
            for j, letter in enumerate("qkv"):
                rows = f"[{32 * j}:{32 * (j + 1)}]"
                found[f"{ours}.attention.sublayer.w{letter}.{part}"] = f"{official}.attn.qkv.{part}{rows}"
            found |= {
                f"{ours}.attention.sublayer.wo.{part}": f"{official}.attn.proj.{part}",
                f"{ours}.feed_forward.sublayer.w_up.{part}": f"{official}.mlp.fc1.{part}",
                f"{ours}.feed_forward.sublayer.w_down.{part}": f"{official}.mlp.fc2.{part}",
            }
    return found


@pytest.fixture(scope="module")
def case(golden_case):
    def run(model, inputs):
        return {"pred": model(inputs["image"], inputs["t"], inputs["label"])}

    return golden_case("siamese_dit", DiT(CONFIG), names(), run=run)


def test_the_map_is_complete(case):
    case.check_map()


def test_the_prediction(case):
    case.check_outputs()


def test_every_gradient(case):
    case.check_gradients()


def test_the_gradient_of_the_image(case):
    image = case.inputs["image"].clone().requires_grad_()
    (case.golden["loss.weight"] * case.model(image, case.inputs["t"], case.inputs["label"])).sum().backward()
    wanted = case.golden["grad_input.image"]
    assert (image.grad - wanted).abs().max() <= 1e-7 * wanted.abs().max()


def test_the_hidden_states(case):
    """The official x is what our norm of x receives, its updates are before the gate, its inputs are modulated."""
    inside = {
        f"{i}.{official}_{what}": (f"layers.{i}.{ours}.sublayer", pick)
        for i in range(3)
        for ours, official in (("attention", "attn"), ("feed_forward", "ffn"))
        for what, pick in (("input", lambda args, output: args[0]), ("update", lambda args, output: output))
    }
    streams = {f"{i}.x": (f"layers.{i}.after_feed_forward.join.norm_x", lambda args, output: args[0]) for i in range(3)}
    others = {
        "final_layer_input": ("after_layers.read.norm_in", lambda args, output: args[0]),
        "t_emb": ("time_embeddings", lambda args, output: output),
        "label_emb": ("label_embeddings", lambda args, output: output),
    }
    case.check_hidden(inside | streams | others, leave_out="cond")
