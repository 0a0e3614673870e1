"""Arguments and checks that several map commands share."""

import argparse
import re
from pathlib import Path

from tqdm import tqdm

from sgl_frspec.maps.corpus.counter import ROLES
from sgl_frspec.maps.corpus.counting import worker_count
from sgl_frspec.maps.corpus.reader import SourceReader
from sgl_frspec.maps.corpus.sources import parse_source
from sgl_frspec.maps.rank import RankOptions, count_tokens
from sgl_frspec.maps.token_map import Ids, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary

_SIZE = re.compile(r"(\d+)(k?)", re.I)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Text to judge a map by, and how to read it."""
    add = parser.add_argument
    add("--text", nargs="+", default=[], metavar="SOURCE", help="held-out text, one domain each")
    add("--roles", choices=ROLES, default=ROLES[0], help="what of chat messages to count")
    add("--workers", type=int, default=worker_count(), help="tokenizing processes (%(default)s)")


def count_domains(args: argparse.Namespace, vocabulary: Vocabulary) -> dict[str, Ids]:
    """The token counts of each source of ``--text``, by its name.

    Raises:
        TokenMapError: a source cannot be read or holds no tokens, or two have the same name.
    """
    readers = [SourceReader(parse_source(text)) for text in args.text]
    options = RankOptions(roles=args.roles, workers=max(1, args.workers))
    total = sum(reader.total_bytes for reader in readers)
    with counting_bar(total) as bar:
        tally = count_tokens(
            readers, vocabulary, options, progress=lambda position: advance(bar, position)
        )
    domains: dict[str, Ids] = {}
    for reader, counts in zip(readers, tally.counts, strict=True):
        name = reader.source.name
        if name in domains:
            raise TokenMapError(f"two sources are called {name!r}; add ,name=LABEL to one of them")
        if not counts.any():
            raise TokenMapError(f"{reader.source.location}: holds no tokens; check its field")
        domains[name] = counts
    return domains


def counting_bar(total_bytes: int) -> tqdm:
    """A bar over the bytes read, with rate and time left; silent where nobody watches."""
    return tqdm(total=total_bytes or None, unit="B", unit_scale=True, desc="counting", disable=None)


def advance(bar: tqdm, position: int) -> None:
    """Move ``bar`` to ``position``."""
    bar.update(position - bar.n)


def parse_size(text: str) -> int:
    """A map size: ``32768`` or ``32k``.

    Raises:
        TokenMapError: anything else.
    """
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if size < 1:
        raise TokenMapError(f"size {text!r} is not a number of ids; write 32768 or 32k")
    return size


def parse_sizes(text: str) -> list[int]:
    """Sizes separated by commas, ascending."""
    return sorted({parse_size(word) for word in text.split(",")})


def check_output(path: Path, *suffixes: str) -> None:
    """Refuse, before any work is done, an output that could not be written.

    Raises:
        TokenMapError: another suffix, or a folder that is missing.
    """
    if path.suffix not in suffixes:
        raise TokenMapError(f"{path}: name the output something{' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise TokenMapError(f"{path}: the folder {path.parent} does not exist")


def check_tokenizer(token_map: TokenMap, vocabulary: Vocabulary, where: str) -> None:
    """Refuse a map of another tokenizer.

    Raises:
        TokenMapError: the fingerprints differ.
    """
    recorded = token_map.metadata.tokenizer_fingerprint
    if recorded is not None and recorded != vocabulary.fingerprint:
        raise TokenMapError(
            f"{where}: made with another tokenizer ({token_map.metadata.tokenizer or 'unnamed'},"
            f" fingerprint {recorded[:12]}) than {vocabulary.path}"
            f" ({vocabulary.fingerprint[:12]}); give the map's own tokenizer"
        )
