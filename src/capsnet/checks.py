"""What is said of a name that does not exist, a library that is missing, a size that cannot be."""

import difflib
from collections.abc import Iterable, Mapping


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> ValueError:
    """Error for a name that does not exist, with the nearest that does.

    >>> print(unknown_name("preset", "minst", ["mnist", "svhn"]))
    unknown preset 'minst'; did you mean 'mnist'? (known: mnist, svhn)
    >>> print(unknown_name("weights", "mnist", [], hint="shipped: none"))
    unknown weights 'mnist' (shipped: none)
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{guess} ({hint or 'known: ' + ', '.join(names)})")


def missing_library(purpose: str, library: str, extra: str) -> ValueError:
    """Error for a library that only an extra installs.

    >>> print(missing_library("reading .mat files", "scipy", "svhn"))
    reading .mat files needs scipy: pip install '.[svhn]' in a checkout, else 'capsnet[svhn]'
    """
    command = f"pip install '.[{extra}]' in a checkout, else 'capsnet[{extra}]'"
    return ValueError(f"{purpose} needs {library}: {command}")


LARGEST_SIZE = 2**31
"""Beyond it torch has no room for a layer, and says so less clearly."""


def check_sizes(sizes: Mapping[str, object], *, minimum: int = 1) -> None:
    """Raises a ValueError that names the first size that is no whole number of at least `minimum`.

    Nor may a size be above 2³¹.

    >>> check_sizes({"num_types": 32, "capsule_dim": 0})
    Traceback (most recent call last):
        ...
    ValueError: capsule_dim must be a whole number of at least 1, got 0
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
        if value > LARGEST_SIZE:
            raise ValueError(f"{name} must be at most {LARGEST_SIZE}, got {value}")


def check_num_labels(num_labels: int, num_classes: int) -> None:
    """Raises a ValueError if an image cannot have so many labels.

    >>> check_num_labels(6, 5)
    Traceback (most recent call last):
        ...
    ValueError: num_labels must be 1 to 5, got 6
    """
    if not 1 <= num_labels <= num_classes:
        raise ValueError(f"num_labels must be 1 to {num_classes}, got {num_labels}")
