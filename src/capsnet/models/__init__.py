"""The networks of the paper, by name or from a config of one's own.

They start from the layers' own initial values; for CapsNet the presets of `capsnet train` choose
those of the authors' code, and the factor that it applies to the primary capsules, in the config.
"""

from capsnet.checks import unknown_name
from capsnet.models.capsnet import CapsNet, CapsNetConfig, CapsNetOutput
from capsnet.models.cnn import CNN, CNNConfig

__all__ = [
    "CNN",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "CapsNetOutput",
    "Model",
    "ModelConfig",
    "build_model",
    "list_models",
    "model_config",
    "model_from_config",
]

Model = CapsNet | CNN
ModelConfig = CapsNetConfig | CNNConfig

# Parameters are counted without the DigitCaps bias of the authors' code (bias=True adds it).
_CONFIGS: dict[str, ModelConfig] = {
    # §4, §4.1: 8,215,568 parameters, 6,804,224 of them without the decoder.
    "capsnet_mnist": CapsNetConfig(),
    # §6: 11,361,808 parameters.
    "capsnet_multimnist": CapsNetConfig(image_height=36, image_width=36),
    # §5.2: 13,475,648 parameters.
    "capsnet_affnist": CapsNetConfig(image_height=40, image_width=40),
    # §7: clutter goes to the orphan category. The paper is silent on reconstruction here; the
    # authors' code has none.
    # Differs from the authors' command for CIFAR-10, which pads both convolutions: 12×12 places
    # instead of 4×4 (padded=True). The paper's text has the architecture of MNIST, which pads none.
    "capsnet_cifar10": CapsNetConfig(
        image_channels=3,
        image_height=24,
        image_width=24,
        primary_types=64,
        decoder=False,
        orphan=True,
    ),
    # §7: "the exact same architecture as we used for MNIST" on the stereo pair.
    "capsnet_smallnorb": CapsNetConfig(
        image_channels=2, image_height=32, image_width=32, num_classes=5
    ),
    # §7: a smaller network.
    "capsnet_svhn": CapsNetConfig(
        image_channels=3,
        image_height=32,
        image_width=32,
        conv_channels=64,
        primary_types=16,
        primary_dim=6,
        output_dim=8,
    ),
    # §5: 35,445,522 parameters.
    "cnn_mnist": CNNConfig(),
    # §6.2: 24,563,978 parameters.
    "cnn_multimnist": CNNConfig(
        image_height=36,
        image_width=36,
        conv_channels=(512, 256),
        conv_kernels=(9, 5),
        pool=2,
        hidden_sizes=(1024,),
        dropout=0.0,
    ),
    # §5.2 gives no sizes, only max-pooling, dropout and about CapsNet's number of parameters.
    "cnn_affnist": CNNConfig(
        image_height=40,
        image_width=40,
        conv_channels=(256, 256, 128),
        pool=2,
        hidden_sizes=(3248, 192),
    ),
}


def list_models() -> tuple[str, ...]:
    """Returns the names that `build_model` knows.

    >>> list_models()[:2]
    ('capsnet_mnist', 'capsnet_multimnist')
    """
    return tuple(_CONFIGS)


def model_config(name: str) -> ModelConfig:
    """Returns the config of one of the paper's networks, for `dataclasses.replace` to change.

    >>> model_config("capsnet_svhn").conv_channels
    64
    """
    if name not in _CONFIGS:
        raise unknown_name("model", name, _CONFIGS)
    return _CONFIGS[name]


def model_from_config(config: ModelConfig) -> Model:
    """Returns a new network of the config's kind and sizes."""
    return CapsNet(config) if isinstance(config, CapsNetConfig) else CNN(config)


def build_model(name: str) -> Model:
    """Returns one of the paper's networks with fresh initial values.

    >>> sum(parameter.numel() for parameter in build_model("capsnet_mnist").parameters())
    8215568
    """
    return model_from_config(model_config(name))
