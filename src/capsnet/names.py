"""What is said of a name that does not exist."""

import difflib
from collections.abc import Iterable


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
