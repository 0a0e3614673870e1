"""Names of ``torchvision.transforms.v2.functional``."""

from ..._missing import missing_from
from .. import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = missing_from(__name__)
