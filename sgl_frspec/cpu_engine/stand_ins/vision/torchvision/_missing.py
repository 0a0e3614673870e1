"""Names that importing code may hold, but not call."""

from collections.abc import Callable
from typing import NoReturn


def missing_from(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's ``__getattr__``: any public name is a function that raises when called."""

    def getattr_(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"{module}.{name}: the CPU engine serves text models only and has no torchvision; "
                "run this model on a GPU"
            )

        missing.__name__ = name
        return missing

    return getattr_
