"""``frspec convert``: to and from the ``.pt`` lists of FR-Spec and stock SGLang."""

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

from sgl_frspec.maps.commands.arguments import check_output, check_tokenizer, parse_size
from sgl_frspec.maps.files import atomic_file, load_token_map, save_token_map
from sgl_frspec.maps.token_map import TokenMap, check_ids
from sgl_frspec.maps.torch_files import torch_file_bytes
from sgl_frspec.maps.vocabulary import Vocabulary, read_vocabulary

EPILOG = """\
  frspec convert freq_32768.pt map.safetensors --tokenizer models/llama3
  frspec convert map.safetensors freq_32768.pt --size 32k

A .pt file holds the ids in rank order as a plain list: what FR-Spec publishes and what stock
SGLang reads as --speculative-token-map. Stock SGLang drafts over the whole file: give --size.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "convert",
        help="to and from the .pt lists of other engines",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="FROM", help=".pt or .safetensors")
    add("target", type=Path, metavar="TO", help=".safetensors or .pt")
    add("--size", help="ids to keep, such as 32768 or 32k")
    add("--tokenizer", type=Path, help="recorded; its end-of-turn and special tokens put first")


def run(args: argparse.Namespace) -> int:
    """Convert, write, and say what was added."""
    check_output(args.target, ".safetensors", ".pt")
    token_map = load_token_map(args.source)
    added: tuple[int, ...] = ()
    if args.tokenizer is not None:
        vocabulary = read_vocabulary(args.tokenizer)
        check_tokenizer(token_map, vocabulary, str(args.source))
        token_map, added = with_required_first(token_map, vocabulary)
    if args.size is not None:
        token_map = token_map.first(parse_size(args.size))
    if args.target.suffix == ".pt":
        data = torch_file_bytes(token_map.ids)
        with atomic_file(args.target) as file:
            file.write(data)
    else:
        save_token_map(token_map, args.target)
    note = f"; {len(added)} required ids were missing: {list(added)}" if added else ""
    sys.stdout.write(f"{args.target}: {len(token_map):,} ids{note}\n")
    return 0


def with_required_first(
    token_map: TokenMap, vocabulary: Vocabulary
) -> tuple[TokenMap, tuple[int, ...]]:
    """The map with its tokenizer recorded and the required ids in front.

    Returns:
        The map, and the required ids that it did not hold before.

    Raises:
        TokenMapError: an id is beyond the vocabulary.
    """
    metadata = token_map.metadata
    vocab_size = metadata.vocab_size or vocabulary.model_vocab_size or vocabulary.size
    check_ids(token_map.ids, vocab_size=vocab_size)
    required = tuple(dict.fromkeys((*metadata.required_ids, *vocabulary.required_ids)))
    required = tuple(i for i in required if i < vocab_size)
    first = np.asarray(required, dtype=np.int64)
    stays = ~np.isin(token_map.ids, first)
    counts = None
    if token_map.counts is not None:
        known = dict(zip(token_map.ids.tolist(), token_map.counts.tolist(), strict=True))
        of_first = np.asarray([known.get(i, 0) for i in required], dtype=np.int64)
        counts = np.concatenate([of_first, token_map.counts[stays]])
    recorded = dataclasses.replace(
        metadata,
        vocab_size=vocab_size,
        tokenizer_fingerprint=vocabulary.fingerprint,
        tokenizer=metadata.tokenizer or vocabulary.name,
        required_ids=required,
    )
    ids = np.concatenate([first, token_map.ids[stays]])
    added = tuple(i for i in required if i not in token_map.ids)
    return TokenMap(ids, counts, recorded), added
