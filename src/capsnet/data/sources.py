"""Where datasets come from.

Every file is downloaded from its authors or a mirror and accepted only with the checksum below.
SHA-256 and sizes are those that the TensorFlow Datasets catalogue recorded when it fetched the same
addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from capsnet.data.storage import FORMS, find_data_dir, find_part
from capsnet.machine import file_digest, make_draft

_TORONTO = "https://www.cs.toronto.edu/~"
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
_NORB = (
    "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
    "http://www.cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
)
_SVHN = (
    "http://ufldl.stanford.edu/housenumbers/",
    "https://ufldl.stanford.edu/housenumbers/",
)


@dataclass(frozen=True)
class RemoteFile:
    """One file as its authors publish it."""

    name: str
    """File name, kept as it is."""
    size: int
    """Bytes."""
    sha256: str
    """Checksum that a download must have."""
    addresses: tuple[str, ...]
    """Where to get it: the authors first, then mirrors."""


@dataclass(frozen=True)
class Source:
    """A dataset that is fetched from its authors."""

    homepage: str
    """Where its authors describe it."""
    terms: str
    """What its authors say about its use."""
    files: tuple[RemoteFile, ...]
    """All files needed."""


def _mirrored(bases: tuple[str, ...], name: str, size: int, *, sha256: str) -> RemoteFile:
    return RemoteFile(name, size, sha256, tuple(base + name for base in bases))


SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT licence",
        (
            _mirrored(
                _FASHION,
                "train-images-idx3-ubyte.gz",
                26421880,
                sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            _mirrored(
                _FASHION,
                "train-labels-idx1-ubyte.gz",
                29515,
                sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            _mirrored(
                _FASHION,
                "t10k-images-idx3-ubyte.gz",
                4422102,
                sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            _mirrored(
                _FASHION,
                "t10k-labels-idx1-ubyte.gz",
                5148,
                sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    "affnist": Source(
        "https://www.cs.toronto.edu/~tijmen/affNIST/",
        "made from MNIST; its author states no licence",
        (
            _mirrored(
                (
                    _TORONTO + "tijmen/affNIST/32x/transformed/",
                    "http://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/",
                ),
                "test.mat.zip",
                121743191,
                sha256="2cde38ec83ee2ebfd7b901f8be5a09efb17a1bda04771f9b4905751eb945c01a",
            ),
        ),
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "no licence stated; its author asks to be cited",
        (
            _mirrored(
                (
                    _TORONTO + "kriz/",
                    "https://cave.cs.toronto.edu/kriz/",
                    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
                ),
                "cifar-10-binary.tar.gz",
                170052171,
                sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
    ),
    "smallnorb": Source(
        "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
        "for research only, not to be sold; its authors ask to be cited",
        (
            _mirrored(
                _NORB,
                "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz",
                131896188,
                sha256="5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
            ),
            _mirrored(
                _NORB,
                "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat.gz",
                348,
                sha256="2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
            ),
            _mirrored(
                _NORB,
                "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz",
                130799817,
                sha256="cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
            ),
            _mirrored(
                _NORB,
                "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz",
                347,
                sha256="ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
            ),
        ),
    ),
    "svhn": Source(
        "http://ufldl.stanford.edu/housenumbers/",
        "for non-commercial use only",
        (
            _mirrored(
                _SVHN,
                "train_32x32.mat",
                182040794,
                sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            _mirrored(
                _SVHN,
                "test_32x32.mat",
                64275384,
                sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
}


@runtime_checkable
class ProgressBar(Protocol):
    """What shows how far a download is; `total` is set when the server says its size."""

    total: int

    def update(self, amount: int) -> None:
        """So many bytes more."""

    def reset(self) -> None:
        """Back to nothing."""

    def close(self) -> None:
        """Done."""


def download(
    name: str,
    data_dir: Path | None = None,
    *,
    report: Callable[[str], None] = print,
    make_progress: Callable[[RemoteFile], ProgressBar] | None = None,
) -> list[Path]:
    """Fetches the files of a dataset that are not there yet, each verified before it is in place.

    Args:
        name: a key of `SOURCES`.
        data_dir: the folder of datasets; the files go into its subfolder `name`.
        report: called with a sentence about each file that is there in another form or bad, and
            each address that failed.
        make_progress: called for each download to show how far it is.

    Returns:
        The paths of all files, save those whose content is there in another form or place.
    """
    folder = find_data_dir(data_dir) / name
    files = [
        file for file in SOURCES[name].files if not _is_elsewhere(name, file, data_dir, report)
    ]
    missing = [file for file in files if not _is_verified(file, folder, report)]
    for file in missing:
        if not _fetch(file, folder, report, make_progress):
            wanted = ", ".join(each.name for each in missing[missing.index(file) :])
            them = "it" if file == missing[-1] else "them"
            raise OSError(
                f"no address delivered {file.name}; fetch {wanted} in another way "
                f"({SOURCES[name].homepage}) and put {them} into {folder}"
            )
    return [folder / file.name for file in files]


def _is_elsewhere(
    name: str, file: RemoteFile, data_dir: Path | None, report: Callable[[str], None]
) -> bool:
    """Whether all that a file holds is there in other files: unpacked, or where the user put it."""
    found = [
        find_part(name, part, data_dir) for part, forms in FORMS[name].items() if file.name in forms
    ]
    own = find_data_dir(data_dir) / name / file.name
    if not found or any(path is None or path == own or not path.stat().st_size for path in found):
        return False
    report(f"{file.name} is not fetched: {found[0]} is there already; remove it to have the other")
    return True


def _is_verified(file: RemoteFile, folder: Path, report: Callable[[str], None]) -> bool:
    path = folder / file.name
    if not path.is_file():
        return False
    if path.stat().st_size == file.size and file_digest(path) == file.sha256:
        return True
    # It stays until a verified one takes its place: it may be all that the user has.
    report(f"{path} is not the file that its authors published; it is fetched again")
    return False


def _fetch(
    file: RemoteFile,
    folder: Path,
    report: Callable[[str], None],
    make_progress: Callable[[RemoteFile], ProgressBar] | None,
) -> bool:
    """Whether some address delivered the file, verified and in place."""
    # Here, not above: pooch and requests take a tenth of a second that only downloads need.
    import pooch
    from requests import RequestException

    draft = make_draft(folder / file.name)
    for address in file.addresses:
        fetch = pooch.HTTPDownloader(
            progressbar=make_progress(file) if make_progress else False,
            timeout=30,
            # A server must not unpack a .gz on the way: its checksum would be another.
            headers={"Accept-Encoding": "identity"},
        )
        try:
            fetch(address, draft, None)
            if file_digest(draft) == file.sha256:
                draft.replace(folder / file.name)
                return True
            report(f"{address} sent a file with a wrong checksum; it was removed")
        except (RequestException, ValueError) as error:
            report(f"{address} could not be reached: {_root_cause(error)}")
        except OSError as error:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(folder / file.name)) from error
        finally:
            draft.unlink(missing_ok=True)
    return False


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__
