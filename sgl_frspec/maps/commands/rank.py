"""``frspec rank``: text -> ranked token map."""

import argparse
import sys
from pathlib import Path

from sgl_frspec.maps.commands.arguments import (
    advance,
    check_output,
    counting_bar,
    parse_size,
)
from sgl_frspec.maps.corpus.counter import ROLES
from sgl_frspec.maps.corpus.counting import worker_count
from sgl_frspec.maps.corpus.reader import SourceReader
from sgl_frspec.maps.corpus.sources import Source, parse_source
from sgl_frspec.maps.files import save_token_map
from sgl_frspec.maps.rank import (
    RankOptions,
    rank_sources,
    ranked_vocab_size,
    unseen_count,
)
from sgl_frspec.maps.token_map import TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary, read_vocabulary

EPILOG = """\
A SOURCE is a file, a folder, - for standard input, or hf:NAME[:CONFIG[:SPLIT]], with options after
commas: weight=W, field=NAME, name=LABEL, format=text|jsonl|parquet|log|ids. Files may be .gz, .xz,
.bz2 or .zst. JSONL and parquet fields hold text, token ids or chat messages; format=log reads
SGLang request logs.

  frspec rank --tokenizer models/qwen3 -o qwen3.safetensors \\
      traffic.jsonl.zst,weight=60 code/,weight=30 zh.parquet,field=text,weight=10

An interrupted run continues when the same command is given again.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "rank",
        help="text -> ranked token map",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE")
    add(
        "--tokenizer",
        required=True,
        type=Path,
        help="model folder, tokenizer.json or tiktoken file",
    )
    add("-o", "--output", required=True, type=Path, help="the map to write, .safetensors")
    add("--size", help="keep only so many ids, such as 32k (default: all; cut it later)")
    add("--require", action="append", default=[], metavar="TOKEN_OR_ID", help="put it first")
    add("--vocab-size", type=int, help="rows of the LM head, if padded past the tokenizer")
    add("--roles", choices=ROLES, default=ROLES[0], help="what of chat messages to count")
    add("--chat-template", type=Path, help="Jinja file to use instead of the tokenizer's template")
    add("--workers", type=int, default=worker_count(), help="tokenizing processes (%(default)s)")
    add("--corpus", help="a note about the sources, kept in the map")
    add("--date", help="kept in the map; none by default: same input, same bytes")
    add("--restart", action="store_true", help="forget an interrupted run")


def run(args: argparse.Namespace) -> int:
    """Rank, write the map, and say what is in it."""
    check_output(args.output, ".safetensors")
    vocabulary = read_vocabulary(args.tokenizer)
    sources = [parse_source(text) for text in args.sources]
    options = RankOptions(
        vocab_size=args.vocab_size,
        required_ids=required_ids(args.require, vocabulary),
        roles=args.roles,
        chat_template=args.chat_template,
        workers=max(1, args.workers),
        checkpoint=_checkpoint(args.output, sources, args.restart),
        corpus=args.corpus,
        date=args.date,
    )
    size = _size(args.size, ranked_vocab_size(vocabulary, args.vocab_size))
    total = sum(SourceReader(source).total_bytes for source in sources)
    with counting_bar(total) as bar:
        ranked = rank_sources(
            sources, vocabulary, options, progress=lambda position: advance(bar, position)
        )
    token_map = ranked if size is None else ranked.first(size)
    save_token_map(token_map, args.output)
    if options.checkpoint is not None:
        options.checkpoint.unlink(missing_ok=True)
    sys.stdout.write(f"{args.output}: {summary(token_map)}\n")
    return 0


def required_ids(words: list[str], vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids for tokens or numbers that a user named.

    Raises:
        TokenMapError: an unknown token, or no end of turn is known and none was named.
    """
    ids = []
    for word in words:
        if word not in vocabulary.tokens and not word.isdecimal():
            raise TokenMapError(f"--require {word}: the tokenizer has no such token")
        ids.append(vocabulary.tokens.get(word) if word in vocabulary.tokens else int(word))
    if not ids and not vocabulary.eos_ids:
        raise TokenMapError(
            f"{vocabulary.path}: no end-of-turn token is known from the tokenizer or its"
            " configuration; name it with --require TOKEN_OR_ID, or no draft can end a reply"
        )
    return tuple(ids)


def _size(text: str | None, vocab_size: int) -> int | None:
    size = None if text is None else parse_size(text)
    if size is not None and size > vocab_size:
        raise TokenMapError(f"--size {text} is more than the vocabulary of {vocab_size} ids")
    return size


def summary(token_map: TokenMap) -> str:
    """One line about a new map."""
    metadata = token_map.metadata
    tokens = sum(source.tokens for source in metadata.sources)
    return (
        f"{len(token_map)} of {metadata.vocab_size} ids, {len(metadata.required_ids)} required"
        f" first, {unseen_count(token_map)} filled in without having been seen;"
        f" {tokens} tokens counted"
    )


def _checkpoint(output: Path, sources: list[Source], restart: bool) -> Path | None:
    path = output.with_name(output.name + ".partial")
    if restart:
        path.unlink(missing_ok=True)
    # What has gone by on standard input or a stream cannot be read again.
    again = all(source.location != "-" and not source.is_dataset for source in sources)
    return path if again else None
