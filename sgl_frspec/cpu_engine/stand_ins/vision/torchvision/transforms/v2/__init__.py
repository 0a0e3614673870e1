"""Names of ``torchvision.transforms.v2``."""

from ..._missing import missing_from
from . import functional

__all__ = ["functional"]
__getattr__ = missing_from(__name__)
