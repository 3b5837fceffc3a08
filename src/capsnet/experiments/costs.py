"""What each experiment costs, estimated from the multiplications of its networks."""

from dataclasses import dataclass
from itertools import pairwise

from capsnet.experiments.catalogue import Experiment
from capsnet.models import CapsNetConfig, CNNConfig, ModelConfig
from capsnet.training import TrainConfig, configure
from capsnet.training.config import total_steps

#: Training examples of the sets whose runs are given in epochs.
_NUM_TRAIN = {
    "mnist": 60_000,
    "mnist-40": 60_000,
    "fashion-mnist": 60_000,
    "cifar10": 50_000,
    "smallnorb": 24_300,
    "svhn": 73_257,
}
#: Multiplications of the direct form in a second of training: on two cores with AVX2 what the
#: steps of `capsnet bench` come to (the fast convolution makes fewer); the GPU's rate is a guess
#: at two fifths of ten teraflops.
_TWO_CORES_CAPSNET, _TWO_CORES_CNN, _ONE_GPU = 120e9, 250e9, 2e12


@dataclass(frozen=True)
class Cost:
    """An estimate."""

    num_runs: int
    """Networks trained."""

    num_steps: int
    """Updates of all of them."""

    cpu_seconds: float
    """On two cores."""

    gpu_seconds: float
    """On one GPU."""


def estimate_cost(experiment: Experiment) -> Cost:
    """What an experiment costs from nothing, with the presets' lengths and the paper's trials.

    >>> from capsnet.experiments.catalogue import find_experiment
    >>> estimate_cost(find_experiment("fig3")).num_runs
    1
    """
    num_runs, num_steps, cpu, gpu = 0, 0, 0.0, 0.0
    for need in experiment.needs:
        config = configure(need.preset, need.changes)
        steps = need.trials * _count_steps(config)
        # Backward is two products for each one forward.
        products = 3 * steps * config.batch_size * count_products(config.model)
        is_capsnet = isinstance(config.model, CapsNetConfig)
        num_runs += need.trials
        num_steps += steps
        cpu += products / (_TWO_CORES_CAPSNET if is_capsnet else _TWO_CORES_CNN)
        gpu += products / _ONE_GPU
    return Cost(num_runs, num_steps, cpu, gpu)


def count_products(config: ModelConfig) -> int:
    """Multiplications of one image's forward pass, in the direct form.

    >>> count_products(CapsNetConfig(decoder=False))  # 8,294,400 + 191,102,976 + 8,847,360
    208244736
    """
    if isinstance(config, CNNConfig):
        return _count_cnn(config)
    rows, columns = (
        size - config.conv_kernel + 1 for size in (config.image_height, config.image_width)
    )
    conv = config.image_channels * config.conv_kernel**2 * config.conv_channels * rows * columns
    primary = (
        config.conv_channels * config.primary_kernel**2 * config.num_primary * config.primary_dim
    )
    # Each iteration sums votes and compares them with the outputs.
    votes = config.num_primary * config.num_classes * config.primary_dim * config.output_dim
    decoder = 0
    if config.decoder:
        pixels = config.image_channels * config.image_height * config.image_width
        sizes = (config.num_classes * config.output_dim, 512, 1024, pixels)
        decoder = sum(below * above for below, above in pairwise(sizes))
    return conv + primary + 2 * config.num_iterations * votes + decoder


def _count_cnn(config: CNNConfig) -> int:
    height, width = config.image_height, config.image_width
    channels, products = config.image_channels, 0
    for above, kernel in zip(config.conv_channels, config.conv_kernels, strict=True):
        products += channels * kernel**2 * above * height * width
        channels, height, width = above, height // config.pool, width // config.pool
    sizes = (channels * height * width, *config.hidden_sizes, config.num_classes)
    return products + sum(below * above for below, above in pairwise(sizes))


def _count_steps(config: TrainConfig) -> int:
    return total_steps(config, _NUM_TRAIN.get(config.data.name, 0) // config.batch_size)
