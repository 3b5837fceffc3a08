"""Exported files compute what PyTorch computes, for any batch, and only such files are kept."""

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch.testing import assert_close

from capsnet import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.models import export as export_module
from capsnet.models.export import export_model, output_names

SMALL = CapsNetConfig(
    image_height=20,
    image_width=19,
    conv_channels=3,
    primary_types=2,
    primary_dim=5,
    output_dim=4,
    num_classes=7,
    bias=True,
)
IMAGES = torch.rand(3, 1, 20, 19, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> CapsNet:
    torch.manual_seed(1)
    return CapsNet(SMALL).eval()


def test_onnx_equals_pytorch_for_any_batch(model: CapsNet, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    names = [f"class {number}" for number in range(7)]
    differences = export_model(model, path, format="onnx", images=IMAGES, class_names=names)
    assert set(differences) == {"lengths", "capsules", "reconstruction"}
    assert max(differences.values()) <= 1e-5
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(differences)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == names
    for size in (1, 2, 6):
        images = torch.rand(size, 1, 20, 19)
        lengths, capsules, reconstruction = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            output = model(images, reconstruct="prediction")
        assert_close(torch.from_numpy(lengths), output.lengths, rtol=0, atol=1e-5)
        assert_close(torch.from_numpy(capsules), output.capsules, rtol=0, atol=1e-5)
        assert_close(torch.from_numpy(reconstruction), output.reconstruction, rtol=0, atol=1e-5)


def test_a_baseline_is_exported_with_its_logits(tmp_path: Path) -> None:
    config = CNNConfig(
        image_height=20, image_width=19, conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(4,)
    )
    model = CNN(config).eval()
    differences = export_model(model, tmp_path / "cnn.onnx", format="onnx", images=IMAGES)
    assert list(differences) == ["logits"]


def test_large_logits_may_differ_by_as_much_more(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = CNNConfig(
        image_height=20, image_width=19, conv_channels=(8,), conv_kernels=(3,), hidden_sizes=(64,)
    )
    model = CNN(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
        assert model(IMAGES).abs().max() > 1000  # whose last bit is above 1e-5
    export_model(model, tmp_path / "cnn.onnx", format="onnx", images=IMAGES)


def test_torch_export_equals_pytorch_for_any_batch(model: CapsNet, tmp_path: Path) -> None:
    path = tmp_path / "small.pt2"
    export_model(model, path, format="torch-export", images=IMAGES)
    program = torch.export.load(path).module()
    for size in (1, 5):
        images = torch.rand(size, 1, 20, 19)
        lengths, _, reconstruction = program(images)
        output = model(images, reconstruct="prediction")
        assert_close(lengths, output.lengths, rtol=0, atol=1e-5)
        assert_close(reconstruction, output.reconstruction, rtol=0, atol=1e-5)


def test_without_a_decoder_there_is_no_reconstruction() -> None:
    blind = CapsNet(CapsNetConfig(**{**vars(SMALL), "decoder": False}))
    assert output_names(blind) == ("lengths", "capsules")
    assert len(export_module.Exported(blind)(IMAGES)) == 2


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_file_that_differs_is_not_kept(
    model: CapsNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    path = tmp_path / "small.pt2"
    path.write_bytes(b"the old file")
    run = export_module._run_program
    monkeypatch.setattr(export_module, "output_names", lambda model: ("lengths",))
    monkeypatch.setattr(export_module.Exported, "forward", _lengths_alone)
    monkeypatch.setattr(
        export_module, "_run_program", lambda path, images: [run(path, images)[0] + wrong]
    )
    with pytest.raises(FloatingPointError, match="the exported lengths differ from PyTorch's"):
        export_model(model, path, format="torch-export", images=IMAGES)
    assert path.read_bytes() == b"the old file"
    assert [file.name for file in tmp_path.iterdir()] == ["small.pt2"]


def _lengths_alone(
    network: export_module.Exported, images: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (network.model(images).lengths,)


@pytest.mark.usefixtures("without_annotation_checks")
def test_each_mistake_is_named(
    model: CapsNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.onnx"
    with pytest.raises(ValueError, match="format must be one of onnx, torch-export, got 'tflite'"):
        export_model(model, path, format="tflite", images=IMAGES)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"a file of torch-export must end in \.pt2, got small\.onnx"
    ):
        export_model(model, path, format="torch-export", images=IMAGES)
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        export_model(model, path, format="onnx", images=IMAGES[:1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs onnx: pip install '\.\[export\]'"):
        export_model(model, path, format="onnx", images=IMAGES)
    assert list(tmp_path.iterdir()) == []
