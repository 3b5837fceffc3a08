import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import capsnet
from capsnet.functional import margin_loss, reconstruction_loss
from capsnet.models import (
    CNN,
    CapsNet,
    CapsNetConfig,
    CNNConfig,
    ModelConfig,
    model_config,
    model_from_config,
)

SMALL = CapsNetConfig(
    image_channels=2,
    image_height=13,
    image_width=15,
    conv_channels=6,
    conv_kernel=3,
    primary_types=3,
    primary_dim=4,
    primary_kernel=5,
    output_dim=7,
    num_classes=5,
)
SMALL_CNN = CNNConfig(conv_channels=(5, 4), conv_kernels=(5, 3), pool=2, hidden_sizes=(23, 17))


def images_of(config: ModelConfig, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, *config.image_shape, dtype=dtype, generator=generator)


def num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_from_config(config).parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("capsnet_mnist", 8_215_568),
        ("capsnet_multimnist", 11_361_808),
        ("capsnet_affnist", 13_475_648),
        # 3·81·256 + 256 + 256·81·512 + 512 + (64·4·4)·10·8·16
        ("capsnet_cifar10", 11_990_528),
        # 2·81·256 + 256 + 256·81·256 + 256 + (32·8·8)·5·8·16 + decoder from 5·16 to 2·32·32
        ("capsnet_smallnorb", 9_327_104),
        # 3·81·64 + 64 + 64·81·96 + 96 + (16·8·8)·10·6·8 + decoder from 10·8 to 3·32·32
        ("capsnet_svhn", 4_720_480),
        ("cnn_mnist", 35_445_522),
        ("cnn_multimnist", 24_563_978),
    ],
)
def test_parameter_counts_are_the_papers(name: str, count: int) -> None:
    assert num_parameters(model_config(name)) == count


def test_parameter_counts_of_variants() -> None:
    config = model_config("capsnet_mnist")
    assert isinstance(config, CapsNetConfig)
    assert num_parameters(replace(config, decoder=False)) == 6_804_224
    assert num_parameters(replace(config, bias=True)) == 8_215_568 + 160
    assert num_parameters(replace(config, learned_priors=True)) == 8_215_568 + 1152 * 10
    of_affnist = num_parameters(model_config("capsnet_affnist"))
    assert abs(num_parameters(model_config("cnn_affnist")) / of_affnist - 1) < 0.01


@pytest.mark.parametrize("changed", ["", "uniform_primary_coupling", "orphan", "padded"])
def test_capsnet_equals_the_reference(changed: str) -> None:
    torch.manual_seed(0)
    config = replace(
        SMALL,
        bias=True,
        initialisation="authors",
        num_iterations=4,
        **{changed: True} if changed else {},
    )
    model = CapsNet(config).double()
    images = images_of(SMALL, dtype=torch.float64)
    output = model(images)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for image in range(2):
        around = [((0, 0), (zeros, zeros), (zeros, zeros)) for zeros in config.paddings]
        features = reference.convolution(
            np.pad(images[image].numpy(), around[0]),
            state["conv.weight"],
            state["conv.bias"],
            stride=1,
        ).clip(min=0)
        uniform = config.uniform_primary_coupling
        maps = reference.convolution(
            np.pad(features, around[1]),
            state["primary.conv.weight"] / (config.primary_types if uniform else 1),
            state["primary.conv.bias"],
            stride=2,
        )
        _, rows, columns = maps.shape
        grid = maps.reshape(3, 4, rows, columns).transpose(2, 3, 0, 1).reshape(-1, 4)
        capsules = np.stack([reference.squash(vector) for vector in grid])
        votes = reference.dense_votes(capsules, state["classes.weight"])
        expected, _, _ = reference.routing(
            votes, 4, bias=state["classes.bias"], orphan=config.orphan
        )
        assert_close(output.capsules[image], torch.from_numpy(expected), rtol=0, atol=1e-12)
    assert_close(output.lengths, output.capsules.norm(dim=-1))


def test_padding_as_in_the_authors_command_for_cifar10() -> None:
    config = model_config("capsnet_cifar10")
    assert isinstance(config, CapsNetConfig)
    padded = replace(config, padded=True)
    assert (config.primary_grid, config.num_primary) == ((4, 4), 1024)
    assert (padded.primary_grid, padded.num_primary) == ((12, 12), 9216)
    assert replace(padded, image_height=1, image_width=1).primary_grid == (1, 1)
    with pytest.raises(ValueError, match="kernels must be odd to be padded, got 8 and 9"):
        replace(padded, conv_kernel=8)


@pytest.mark.parametrize("initialisation", ["paper", "authors"])
def test_every_parameter_gets_a_gradient(initialisation: str) -> None:
    torch.manual_seed(0)
    model = CapsNet(
        replace(
            SMALL,
            initialisation=initialisation,  # type: ignore[arg-type]
            learned_priors=True,
            bias=True,
            orphan=True,
            uniform_primary_coupling=True,
        )
    )
    images, labels = images_of(SMALL), torch.tensor([1, 4])
    output = model(images, reconstruct=labels)
    targets = torch.nn.functional.one_hot(labels, 5)
    (
        margin_loss(output.lengths, targets) + reconstruction_loss(output.reconstruction, images)
    ).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_authors_initial_values() -> None:
    torch.manual_seed(0)
    model = CapsNet(
        replace(CapsNetConfig(), initialisation="authors", bias=True, learned_priors=True)
    )
    for name, parameter in model.named_parameters():
        if name == "classes.prior_logits":
            assert (parameter == 0).all()
        elif name.endswith("bias"):
            assert (parameter == 0.1).all(), name
        else:
            std = 0.05 if name == "conv.weight" else 0.1
            assert parameter.abs().max() <= 2 * std, name
            # Cut at two deviations, a normal keeps 0.8796 of its deviation.
            assert abs(parameter.std().item() / (0.8796 * std) - 1) < 0.02, name


def test_reconstruction_from_label_prediction_or_any_class() -> None:
    torch.manual_seed(0)
    model = CapsNet(SMALL)
    images = images_of(SMALL)
    output = model(images, reconstruct="prediction")
    predicted = model.predict(images)[:, 0]
    assert_close(output.lengths.argmax(dim=1), predicted)
    assert_close(output.reconstruction, model(images, reconstruct=predicted).reconstruction)
    assert_close(output.reconstruction, model.decode(output.capsules, predicted))
    both = model(images, reconstruct=torch.tensor([[0, 3], [2, 1]])).reconstruction
    assert both.shape == (2, 2, *SMALL.image_shape)
    assert model(images).reconstruction is None


def test_prediction_of_two_classes_takes_the_two_longest() -> None:
    torch.manual_seed(0)
    model = CapsNet(SMALL)
    order = model(images_of(SMALL)).lengths.argsort(dim=1, descending=True)
    assert_close(model.predict(images_of(SMALL), num_labels=2), order[:, :2])


def test_trace_holds_every_iteration_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = CapsNet(SMALL)
    plain, traced = model(images_of(SMALL)), model(images_of(SMALL), trace=True)
    assert plain.routing is None
    assert traced.routing is not None
    assert [step.coupling.shape for step in traced.routing] == [(2, SMALL.num_primary, 5)] * 3
    assert_close(traced.capsules, plain.capsules)


def test_function_transforms_agree_with_autograd() -> None:
    torch.manual_seed(0)
    model, images = CapsNet(SMALL), images_of(SMALL)
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def total(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        output = torch.func.functional_call(model, weights, images, {"reconstruct": "prediction"})
        result: Tensor = output.lengths.square().sum() + output.reconstruction.sum()
        return result

    got = torch.func.grad(total)(weights, images)
    single = torch.func.vmap(torch.func.grad(total), (None, 0))(weights, images.unsqueeze(1))
    total(dict(model.named_parameters()), images).backward()
    for name, parameter in model.named_parameters():
        assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5)
        assert_close(single[name].sum(dim=0), parameter.grad, rtol=1e-4, atol=1e-5)


def test_shapes_can_be_had_on_the_meta_device() -> None:
    with torch.device("meta"):
        output = CapsNet(SMALL)(torch.empty(2, *SMALL.image_shape), reconstruct="prediction")
    assert output.capsules.shape == (2, 5, 7)
    assert output.reconstruction.shape == (2, *SMALL.image_shape)


def test_float64_and_float32_agree() -> None:
    torch.manual_seed(0)
    model = CapsNet(SMALL)
    low = model(images_of(SMALL)).capsules
    high = model.double()(images_of(SMALL).double()).capsules
    assert_close(low.double(), high, rtol=1e-4, atol=1e-5)


COMPILE = """
import torch
from capsnet.layers import ConvCapsules
from capsnet.models import CapsNet, CapsNetConfig
torch.manual_seed(0)
model = CapsNet(CapsNetConfig(image_height=13, image_width=15, conv_channels=6, conv_kernel=3,
                              primary_types=3, primary_kernel=5, num_classes=5))
images, labels = torch.rand(2, 1, 13, 15), torch.tensor([1, 4])
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
got, expected = compiled(images, reconstruct=labels), model(images, reconstruct=labels)
torch.testing.assert_close(got[:3], expected[:3])
with torch.autocast("cpu", dtype=torch.bfloat16):
    got, expected = compiled(images), model(images)
torch.testing.assert_close(got.lengths.float(), expected.lengths, atol=0.02, rtol=0.02)
model.conv.algorithm = model.primary.conv.algorithm = "frequency"
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(images).lengths, model(images).lengths)
layer, grid = ConvCapsules(2, 3, out_types=4, out_dim=5, kernel_size=3), torch.randn(2, 5, 6, 2, 3)
compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(grid), layer(grid))
"""


DISTRIBUTED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from capsnet.models import CapsNet, CapsNetConfig
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = CapsNet(CapsNetConfig(image_height=13, image_width=15, conv_channels=6, conv_kernel=3,
                              primary_types=3, primary_kernel=5, num_classes=5, decoder=False))
images = torch.rand(2, 1, 13, 15)
wrapped = DistributedDataParallel(model)
lengths = wrapped(images).lengths
lengths.sum().backward()
torch.testing.assert_close(lengths, model(images).lengths)
assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
del wrapped  # before the group that it holds on to
dist.destroy_process_group()
"""


@pytest.mark.parametrize("script", [COMPILE, DISTRIBUTED], ids=["compile", "distributed"])
def test_works_compiled_to_one_graph_and_in_data_parallel(script: str, tmp_path: Path) -> None:
    # In processes of their own: the annotations that tests execute would break the graph.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_cnn_gives_logits_and_every_parameter_a_gradient() -> None:
    torch.manual_seed(0)
    model = CNN(SMALL_CNN)
    logits = model(images_of(SMALL_CNN))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    model.eval()
    largest = model(images_of(SMALL_CNN)).topk(2, dim=1).indices
    assert_close(model.predict(images_of(SMALL_CNN), num_labels=2), largest)


def test_cnn_leaves_out_a_share_of_the_units_below_the_last_layer_in_training_only() -> None:
    torch.manual_seed(0)
    model = CNN(replace(SMALL_CNN, dropout=0.75, hidden_sizes=(23, 400)))
    seen: list[Tensor] = []
    model.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = images_of(SMALL_CNN, batch=8)
    model(images)
    model.eval()
    model(images)
    trained, plain = seen
    left_out = (trained == 0) & (plain > 0)
    assert abs(float(left_out.sum() / (plain > 0).sum()) - 0.75) < 0.05
    assert_close(trained[trained > 0], 4 * plain[trained > 0])
    assert_close(model(images), model(images), rtol=0, atol=0)


def test_mnist_baseline_keeps_the_image_size_up_to_the_dense_layers() -> None:
    with torch.device("meta"):
        model = capsnet.build_model("cnn_mnist")
        assert isinstance(model, CNN)
        assert model.hidden[0].weight.shape == (328, 28 * 28 * 128)


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image_height": 16},
            "kernels of 9 and 9 need images of at least 17×17 pixels, got 16×28",
        ),
        ({"num_iterations": 0}, "num_iterations must be a whole number of at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must be a whole number of at least 1, got -1"),
        ({"initialisation": "other"}, "'paper' or 'authors', got 'other'"),
    ],
)
def test_impossible_capsnets_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CapsNetConfig(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_kernels": (5, 5)}, r"of one length, got \(256, 256, 128\) and \(5, 5\)"),
        ({"conv_kernels": (5, 4, 5)}, r"must be odd, got \(5, 4, 5\)"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"pool": 0}, "pool must be a whole number of at least 1, got 0"),
        ({"image_channels": -1}, "image_channels must be a whole number of at least 1, got -1"),
        ({"conv_channels": (4, 0, 4)}, r"conv_channels\[1\] must be .* at least 1, got 0"),
        ({"conv_kernels": (-1, 5, 5)}, r"conv_kernels\[0\] must be .* at least 1, got -1"),
        ({"hidden_sizes": (2**40,)}, r"hidden_sizes\[0\] must be at most 2147483648, got 109"),
        ({"pool": 4}, "3 poolings by 4 leave nothing of an image of 28×28 pixels"),
    ],
)
def test_impossible_cnns_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CNNConfig(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_labels", [0, 6])
@pytest.mark.parametrize("model", [CapsNet(SMALL), CNN(replace(SMALL_CNN, num_classes=5))])
def test_prediction_of_more_labels_than_classes_is_named(
    model: CapsNet | CNN, num_labels: int
) -> None:
    with pytest.raises(ValueError, match=f"num_labels must be 1 to 5, got {num_labels}"):
        model.predict(images_of(model.config), num_labels)


@pytest.mark.usefixtures("without_annotation_checks")
def test_wrong_images_and_missing_decoder_are_named() -> None:
    model = CapsNet(replace(SMALL, decoder=False))
    with pytest.raises(ValueError, match=r"\(B, 2, 13, 15\), got \(1, 2, 15, 13\)"):
        model(torch.zeros(1, 2, 15, 13))
    with pytest.raises(ValueError, match="has no decoder: it was built with decoder=False"):
        model(
            torch.zeros(1, 2, 15, 13), reconstruct="prediction"
        )  # before the images are looked at
    with pytest.raises(ValueError, match="'prediction' or None, got 'label'"):
        model(images_of(SMALL), reconstruct="label")
    with pytest.raises(ValueError, match=r"must be a tensor of classes, .*, got \[0, 1\]"):
        model(images_of(SMALL), reconstruct=[0, 1])
    with pytest.raises(ValueError, match=r"\(B, 1, 28, 28\), got \(1, 3, 28, 28\)"):
        CNN(SMALL_CNN)(torch.zeros(1, 3, 28, 28))


def test_unknown_model_suggests_the_right_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown model 'capsnet_minst'; did you mean 'capsnet_mnist'\?"
    ):
        capsnet.build_model("capsnet_minst")


@pytest.mark.parametrize("model", [CapsNet(SMALL), CNN(SMALL_CNN)], ids=["CapsNet", "CNN"])
def test_hooks_see_what_a_convolution_gives_and_gets(model: CapsNet | CNN) -> None:
    conv = model.conv if isinstance(model, CapsNet) else model.convs[0]
    seen: list[Tensor] = []
    conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    conv.register_full_backward_hook(lambda module, inputs, outputs: seen.extend(outputs))
    output = model(torch.randn(2, *model.config.image_shape, requires_grad=True))
    (output if isinstance(output, Tensor) else output.lengths).sum().backward()
    before, gradient = seen
    assert before.min() < 0  # not yet through the ReLU
    assert gradient.shape == before.shape
    assert gradient[before < 0].abs().max() == 0


@pytest.mark.parametrize("model", [CapsNet(SMALL), CNN(SMALL_CNN)], ids=["CapsNet", "CNN"])
def test_predictions_can_be_learned_from_and_changed(model: CapsNet | CNN) -> None:
    images = torch.randn(3, *model.config.image_shape)
    labels = model.predict(images)[:, 0]
    output = model(images)
    F.cross_entropy(output if isinstance(output, Tensor) else output.lengths, labels).backward()
    labels[0] = 1
    assert not labels.is_inference()


def test_a_run_without_numbers_leaves_later_ones_as_they_are() -> None:
    for _ in range(2):
        with FakeTensorMode():
            model = CapsNet(CapsNetConfig())
            labels = torch.zeros(16, dtype=torch.int64)
            output = model(torch.rand(16, 1, 28, 28), reconstruct=labels)
            assert output.reconstruction is not None
            output.reconstruction.sum().backward()
    assert CapsNet(CapsNetConfig())(torch.rand(16, 1, 28, 28)).lengths.shape == (16, 10)


@pytest.mark.usefixtures("without_annotation_checks")
def test_classes_as_an_array_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="reconstruct must be a tensor of classes, 'prediction'"):
        CapsNet(SMALL)(
            torch.randn(2, *SMALL.image_shape),
            reconstruct=np.array([1, 2]),
        )
