"""``frspec inspect``: what maps hold, and how much of a text they cover."""

import argparse
import sys
from pathlib import Path

from sgl_frspec.maps import inspection
from sgl_frspec.maps.commands.arguments import (
    add_text_arguments,
    check_output,
    check_tokenizer,
    count_domains,
    parse_sizes,
)
from sgl_frspec.maps.coverage import SIZES, coverage_curve, id_order_map, own_counts
from sgl_frspec.maps.files import atomic_file, load_token_map
from sgl_frspec.maps.picture import Curve, draw_curves, inline_svg, thinned
from sgl_frspec.maps.report import Section, as_html, as_text
from sgl_frspec.maps.token_map import Ids, TokenMap, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary, read_vocabulary

ID_ORDER = "token-id order"
EPILOG = """\
  frspec inspect map.safetensors
  frspec inspect map.safetensors --tokenizer models/qwen3 \\
      --text chat.jsonl,name=chat code/,name=code --picture coverage.html

Several maps are compared with each other and with the tokenizer's own order.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand's arguments."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a map holds, and how much it covers",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("maps", nargs="+", type=Path, metavar="MAP")
    add("--tokenizer", type=Path, help="model folder or tokenizer file; needed with --text")
    add_text_arguments(parser)
    add("--sizes", help="sizes to judge, such as 4k,8k,32768 (default: 4k to 64k)")
    add("--missing", type=int, default=10, help="tokens to list for each domain (%(default)s)")
    add("--picture", type=Path, help="coverage curves, .html, .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Print the report, and draw the picture if one is asked for."""
    if args.text and args.tokenizer is None:
        raise TokenMapError("--text needs --tokenizer, the folder or file of the map's tokenizer")
    if args.picture is not None:
        check_output(args.picture, ".html", ".svg", ".png")
    maps = _load_maps(args.maps)
    vocabulary = read_vocabulary(args.tokenizer) if args.tokenizer else None
    for name, token_map in maps.items():
        if vocabulary is not None:
            check_tokenizer(token_map, vocabulary, name)
    sizes = _sizes(args.sizes, maps)
    domains = count_domains(args, vocabulary) if vocabulary and args.text else {}
    sections = _sections(maps, vocabulary, inspection.with_total(domains), sizes, args.missing)
    sys.stdout.write(as_text(sections))
    if args.picture is not None:
        _write_picture(args.picture, _curves(maps, vocabulary, domains), sizes, sections)
    return 0


def _load_maps(paths: list[Path]) -> dict[str, TokenMap]:
    maps: dict[str, TokenMap] = {}
    for path in paths:
        name = path.stem if path.stem not in maps else str(path)
        maps[name] = load_token_map(path)
    return maps


def _sizes(text: str | None, maps: dict[str, TokenMap]) -> list[int]:
    if text is not None:
        return parse_sizes(text)
    largest = max(len(token_map) for token_map in maps.values())
    return [size for size in SIZES if size < largest] + [largest] * (largest < SIZES[-1])


def _sections(
    maps: dict[str, TokenMap],
    vocabulary: Vocabulary | None,
    domains: dict[str, Ids],
    sizes: list[int],
    missing: int,
) -> list[Section]:
    sections = []
    for name, token_map in maps.items():
        sections.append(inspection.description(token_map, name, vocabulary))
        if token_map.metadata.sources:
            sections.append(inspection.source_table(token_map.metadata.sources))
        own = inspection.ranking_coverage(token_map, sizes)
        sections += [own] if own else []
        if vocabulary is not None and len(maps) == 1:
            sections.append(inspection.categories(token_map, vocabulary, sizes))
    if vocabulary is None or not domains:
        return sections
    compared = {**maps, ID_ORDER: id_order_map(vocabulary)}
    sections.append(inspection.held_out_coverage(compared, domains, sizes))
    if len(maps) == 1 and missing > 0:
        (token_map,) = maps.values()
        lacking = inspection.missing_tokens(
            token_map, domains, vocabulary, size=min(sizes[-1], len(token_map)), limit=missing
        )
        sections += [lacking] if lacking.rows else []
    return sections


def _curves(
    maps: dict[str, TokenMap], vocabulary: Vocabulary | None, domains: dict[str, Ids]
) -> list[Curve]:
    """A line a domain; for several maps a line a map over all domains; else the map's own text."""
    total = inspection.with_total(domains)
    if len(maps) > 1 and total:
        total = {inspection.ALL: list(total.values())[-1]}
    curves = []
    for name, token_map in maps.items():
        texts = total or {"its own corpus": own_counts(token_map)}
        for domain, counts in texts.items():
            if counts is not None:
                label = name if len(maps) > 1 else domain
                curves.append(Curve(label, *thinned(coverage_curve(token_map, counts))))
    if vocabulary is not None and total:
        order = coverage_curve(id_order_map(vocabulary), list(total.values())[-1])
        curves.append(Curve(ID_ORDER, *thinned(order), dashed=True))
    if not curves:
        raise TokenMapError("the map has no counts to draw; give text with --text and --tokenizer")
    return curves


def _write_picture(
    path: Path, curves: list[Curve], sizes: list[int], sections: list[Section]
) -> None:
    title = "Share of tokens that the map covers"
    image_format = "png" if path.suffix == ".png" else "svg"
    image = draw_curves(
        curves, title=title, ylabel="share covered", image_format=image_format, marks=sizes
    )
    if path.suffix == ".html":
        image = as_html(title, sections, inline_svg(image)).encode()
    with atomic_file(path) as file:
        file.write(image)
