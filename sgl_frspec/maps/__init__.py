"""Token maps: load, check, rank, cut and judge them. Needs neither sglang nor a GPU."""

from sgl_frspec.maps.files import load_token_map, save_token_map
from sgl_frspec.maps.fingerprint import tokenizer_fingerprint
from sgl_frspec.maps.fit import FittedMap, fit_token_map
from sgl_frspec.maps.token_map import MapMetadata, SourceRecord, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary, read_vocabulary, required_token_ids

__all__ = [
    "FittedMap",
    "MapMetadata",
    "SourceRecord",
    "TokenMap",
    "TokenMapError",
    "Vocabulary",
    "fit_token_map",
    "load_token_map",
    "read_vocabulary",
    "required_token_ids",
    "save_token_map",
    "tokenizer_fingerprint",
]
