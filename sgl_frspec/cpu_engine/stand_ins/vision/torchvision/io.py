"""Names of ``torchvision.io``."""

from ._missing import missing_from

__getattr__ = missing_from(__name__)
