"""Names of ``torchvision.transforms``."""

from enum import Enum

from .._missing import missing_from


class InterpolationMode(Enum):
    """Importing code uses the members as default arguments."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from . import functional, v2  # noqa: E402

__all__ = ["InterpolationMode", "functional", "v2"]
# After the submodules: `from . import` takes an attribute before it looks for a module.
__getattr__ = missing_from(__name__)
