"""Check at a start that the packages `planner` and `recovery` are this distribution's own.

PyPI has other distributions with these top-level names. pip installs both into one folder without a
word: the later `__init__.py` replaces the earlier, and uninstalling one removes the other's. A
folder in the working directory hides them as well. The check imports nothing heavy but the two
packages, and looks further only where one is foreign.
"""

import importlib
from types import ModuleType

PACKAGES = ("planner", "recovery")
OWNER = "autohet"


def require_own_packages() -> None:
    """Raise ImportError, in one sentence, if a package is another distribution's or lacks parts."""
    for name in PACKAGES:
        try:
            package = importlib.import_module(name)
        except Exception:  # noqa: BLE001 (a foreign package may raise anything)
            raise ImportError(_remedy(name, None)) from None
        if getattr(package, "DISTRIBUTION", None) != OWNER:
            raise ImportError(_remedy(name, package))


def _remedy(name: str, package: ModuleType | None) -> str:
    place = ""
    if package is not None and package.__file__ is not None:
        place = f" of {package.__file__}"
    # Here, since it is slow to import.
    from importlib.metadata import packages_distributions

    owners = set(packages_distributions().get(name, ())) - {OWNER}
    remove = ""
    if owners:
        remove = f"pip uninstall {' '.join(sorted(owners))}, then "
    return (
        f"the package '{name}'{place} is not AutoHet's, which has one of that name: {remove}pip"
        f" install --force-reinstall --no-deps {OWNER}, or start where no folder '{name}' hides it"
    )
