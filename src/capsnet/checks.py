"""What is said of a name that does not exist, or of a size that cannot be."""

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


def check_sizes(sizes: Mapping[str, object], *, minimum: int = 1) -> None:
    """Raises a ValueError that names the first size that is no whole number of at least `minimum`.

    >>> check_sizes({"num_types": 32, "capsule_dim": 0})
    Traceback (most recent call last):
        ...
    ValueError: capsule_dim must be a whole number of at least 1, got 0
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
