"""What the benchmark measures: training steps, evaluation and single operations, both ways."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.experiments import textbook
from capsnet.functional import (
    DenseVotes,
    convolve2d,
    dynamic_routing,
    margin_loss,
    reconstruction_loss,
    store_parents_first,
    store_taps_first,
)
from capsnet.functional.plan import make_plan
from capsnet.models import CapsNet, CapsNetConfig, model_config, model_from_config
from capsnet.training.optimiser import FusedAdam

Kind = Literal["train", "evaluate", "convolution", "products", "first", "routing", "matmul"]
Implementation = Literal["capsnet", "textbook"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("capsnet", "textbook")


@dataclass(frozen=True)
class Task:
    """What is measured: one kind of work at one size."""

    kind: Kind
    """A training step, evaluation of a batch, or forward and backward of one operation alone:
    the primary convolution, the products in its frequency form, the first convolution, routing."""
    batch: int = 128
    """Images."""
    model: str = "capsnet_mnist"
    """Network of a training step or evaluation."""
    size: int = 20
    """Rows and columns of the 256 feature maps under the primary convolution."""
    capsules: int = 1152
    """Capsules below, in routing."""
    classes: int = 10
    """Capsules above, in routing."""
    iterations: int = 3
    """Iterations of routing."""


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    title: str
    task: Task
    target: float | None = None
    """How many times faster than plain PyTorch this has to be."""


CASES = (
    Case("mnist", "training step, CapsNet, MNIST", Task("train"), 4.0),
    Case("multimnist", "… MultiMNIST", Task("train", model="capsnet_multimnist"), 4.0),
    Case("svhn", "… SVHN", Task("train", model="capsnet_svhn")),
    Case("cnn-mnist", "… baseline CNN, MNIST", Task("train", model="cnn_mnist"), 3.0),
    Case("cnn-multimnist", "… baseline CNN, MultiMNIST", Task("train", model="cnn_multimnist")),
    Case("conv20", "primary convolution, 20×20", Task("convolution"), 3.0),
    Case("conv28", "… 28×28", Task("convolution", size=28), 3.5),
    Case("routing", "routing, 1152 → 10 capsules", Task("routing"), 5.0),
    Case("evaluate256", "evaluation, MNIST, 256 images", Task("evaluate", batch=256), 2.5),
    Case("evaluate1", "… one image", Task("evaluate", batch=1)),
)


def prepare(task: Task, implementation: Implementation) -> Callable[[], None]:
    """Returns the work of a task as a function that can be called again and again."""
    torch.manual_seed(0)
    ours = implementation == "capsnet"
    match task.kind:
        case "train":
            return _prepare_training(task, ours)
        case "evaluate":
            return _prepare_evaluation(task, ours)
        case "convolution":
            return _prepare_convolution(task, ours)
        case "products":
            return _prepare_products(task)
        case "first":
            return _prepare_first(task, ours)
        case "routing":
            return _prepare_routing(task, ours)
        case "matmul":
            left, right = torch.randn(2, 2048, 2048)
            product = torch.empty(2048, 2048)
            return lambda: _discard(torch.mm(left, right, out=product))


def _prepare_training(task: Task, ours: bool) -> Callable[[], None]:
    model, images = _prepare_model(task, ours)
    optimiser = (FusedAdam if ours else torch.optim.Adam)(model.parameters(), lr=1e-4)
    num_labels = 2 if "multimnist" in task.model else 1
    labels = torch.rand(task.batch, 10).topk(num_labels).indices
    targets = torch.rand(task.batch, num_labels, *images.shape[1:])
    present = F.one_hot(labels, 10).sum(dim=1).float()

    def step() -> None:
        if task.model.startswith("cnn"):
            loss = F.cross_entropy(model(images), present / num_labels)
        else:
            if isinstance(model, CapsNet):
                output = model(images, reconstruct=labels)
                lengths, reconstruction = output.lengths, output.reconstruction
            else:
                lengths, reconstruction = model(images, labels)
            loss = margin_loss(lengths, present)
            loss = loss + 0.0005 * reconstruction_loss(reconstruction, targets)
        torch.autograd.backward(loss)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _prepare_evaluation(task: Task, ours: bool) -> Callable[[], None]:
    model, images = _prepare_model(task, ours)
    model.eval()

    def evaluate() -> None:
        with torch.inference_mode():
            _discard(model(images))

    return evaluate


def _prepare_model(task: Task, ours: bool) -> tuple[nn.Module, Tensor]:
    config = model_config(task.model)
    images = torch.rand(task.batch, *config.image_shape)
    if ours:
        return model_from_config(config), images
    if isinstance(config, CapsNetConfig):
        return textbook.TextbookCapsNet(config), images
    return textbook.TextbookCNN(config), images


def _prepare_convolution(task: Task, ours: bool) -> Callable[[], None]:
    images = torch.randn(task.batch, 256, task.size, task.size).relu_()
    weight = 0.05 * torch.randn(256, 256, 9, 9)
    if ours:  # as the first layer and an optimiser leave them
        images = images.contiguous(memory_format=torch.channels_last)
        weight = store_taps_first(weight)
    images.requires_grad_()
    weight.requires_grad_()
    ahead = torch.randn(F.conv2d(images[:1, :, :, :].detach(), weight.detach(), stride=2).shape[1:])

    def both_passes() -> None:
        convolve = convolve2d if ours else F.conv2d
        outputs = convolve(images, weight, stride=2)
        torch.autograd.grad(outputs, (images, weight), ahead.expand_as(outputs))

    return both_passes


def _prepare_products(task: Task) -> Callable[[], None]:
    """The matrix products of the frequency form and of both its gradients, without transforms."""
    plan = make_plan(
        (task.size, task.size), (9, 9), stride=2, padding=0, num_tiles=(1, 1), dtype=torch.float32
    )
    factors = max(sum(len(taps) for taps in phase.taps) for phase in plan.phases)
    data, kernel = torch.randn(factors, task.batch, 256), torch.randn(factors, 256, 256)
    products, gradient = torch.empty_like(data), torch.empty_like(kernel)
    counts = [sum(len(taps) for taps in phase.taps) for phase in plan.phases]

    def multiply() -> None:
        for n in counts:
            torch.bmm(data[:n], kernel[:n], out=products[:n])
            torch.bmm(data[:n], kernel[:n].transpose(1, 2), out=products[:n])
            torch.bmm(data[:n].transpose(1, 2), data[:n], out=gradient[:n])

    return multiply


def _prepare_first(task: Task, ours: bool) -> Callable[[], None]:
    images = torch.rand(task.batch, 1, 28, 28)
    weight, bias = torch.randn(256, 1, 9, 9, requires_grad=True), torch.randn(256)
    bias.requires_grad_()
    convolve = convolve2d if ours else F.conv2d
    ahead = torch.randn(convolve(images, weight, bias).shape).contiguous(
        memory_format=torch.channels_last
    )

    def both_passes() -> None:
        outputs = convolve(images, weight, bias).relu_()
        torch.autograd.grad(outputs, (weight, bias), ahead)

    return both_passes


def _prepare_routing(task: Task, ours: bool) -> Callable[[], None]:
    capsules = 0.3 * torch.randn(task.batch, task.capsules, 8)
    weight = 0.1 * torch.randn(task.capsules, task.classes, 8, 16)
    weight = store_parents_first(weight) if ours else weight
    capsules.requires_grad_()
    weight.requires_grad_()
    ahead = torch.randn(task.batch, task.classes, 16)

    def both_passes() -> None:
        if ours:
            outputs = dynamic_routing(DenseVotes(capsules, weight), task.iterations)
        else:
            votes = torch.einsum("bid,ijde->bije", capsules, weight)
            outputs = textbook.route(votes, task.iterations)
        torch.autograd.grad(outputs, (capsules, weight), ahead)

    return both_passes


def _discard(value: object) -> None:
    """Says that a result is not needed."""
