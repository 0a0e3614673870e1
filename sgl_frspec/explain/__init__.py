"""An arithmetic model of a speculative cycle: bytes, operations and time from a configuration."""

from sgl_frspec.explain.cycle import Head, Speculation, cycle_cost
from sgl_frspec.explain.device import Device, find_device
from sgl_frspec.explain.ledger import CycleCost, Part
from sgl_frspec.explain.line import VocabularyLine, vocabulary_line
from sgl_frspec.explain.model_shape import ModelShape, read_model_shape

__all__ = [
    "CycleCost",
    "Device",
    "Head",
    "ModelShape",
    "Part",
    "Speculation",
    "VocabularyLine",
    "cycle_cost",
    "find_device",
    "read_model_shape",
    "vocabulary_line",
]
