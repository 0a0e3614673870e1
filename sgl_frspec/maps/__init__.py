"""Token maps: load, check, rank, cut and judge them. Needs neither sglang nor a GPU."""

from sgl_frspec.maps.corpus.sources import Source, parse_source
from sgl_frspec.maps.coverage import coverage_at, coverage_curve, id_order_map, missing_ids
from sgl_frspec.maps.files import load_token_map, save_token_map
from sgl_frspec.maps.fingerprint import tokenizer_fingerprint
from sgl_frspec.maps.fit import FittedMap, fit_token_map
from sgl_frspec.maps.merging import merge_maps
from sgl_frspec.maps.rank import RankOptions, rank_sources
from sgl_frspec.maps.token_map import MapMetadata, SourceRecord, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary, read_vocabulary, required_token_ids

__all__ = [
    "FittedMap",
    "MapMetadata",
    "RankOptions",
    "Source",
    "SourceRecord",
    "TokenMap",
    "TokenMapError",
    "Vocabulary",
    "coverage_at",
    "coverage_curve",
    "fit_token_map",
    "id_order_map",
    "load_token_map",
    "merge_maps",
    "missing_ids",
    "parse_source",
    "rank_sources",
    "read_vocabulary",
    "required_token_ids",
    "save_token_map",
    "tokenizer_fingerprint",
]
