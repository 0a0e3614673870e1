"""From ``--speculative-token-map`` to the ids that one server drafts over.

The map is checked against the model's configuration and tokenizer, before any weights are loaded.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from sgl_frspec.maps import (
    FittedMap,
    TokenMapError,
    Vocabulary,
    fit_token_map,
    load_token_map,
    read_vocabulary,
)
from sgl_frspec.maps.vocabulary import tokenizer_file
from sgl_frspec.model_config import read_config
from sgl_frspec.options import read_options

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """What a map is checked against.

    Attributes:
        vocab_size: rows of the LM head that stand for tokens.
        eos_ids: from the model's configuration.
        vocabulary: the tokenizer's, or None if its files are not on this machine.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    vocabulary: Vocabulary | None


def read_hot_ids(server_args: Any, *, announce: bool = False) -> FittedMap:
    """The hot ids of the server described by ``server_args``, ascending.

    Args:
        server_args: SGLang's arguments (or its view of them).
        announce: log what the draft will propose, and what the map lacked.

    Raises:
        TokenMapError: there is no map, or it does not fit the model.
    """
    path = server_args.speculative_token_map
    if not path:
        raise TokenMapError(
            "FRSPEC needs --speculative-token-map FILE, a ranked token map; make one with"
            " `frspec rank`, or use --speculative-algorithm EAGLE to draft over everything"
        )
    token_map = load_token_map(path)
    target = read_target(server_args)
    vocabulary = target.vocabulary
    fitted = fit_token_map(
        token_map,
        vocab_size=target.vocab_size,
        size=read_options().map_size,
        required_ids={*target.eos_ids, *(vocabulary.required_ids if vocabulary else ())},
        min_size=server_args.speculative_eagle_topk or 1,
        tokenizer_fingerprint=vocabulary.fingerprint if vocabulary else None,
    )
    if announce:
        _announce(path, fitted, target)
    return fitted


def read_target(server_args: Any) -> Target:
    """Sizes and special ids of the served model, from its configuration and tokenizer files."""
    config = read_config(server_args, server_args.model_path, server_args.revision)
    text_config = config.get_text_config()
    eos = text_config.eos_token_id
    if eos is None:
        eos = config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Target(text_config.vocab_size, tuple(eos_ids), _vocabulary(server_args))


def _announce(path: str, fitted: FittedMap, target: Target) -> None:
    share = len(fitted.ids) / target.vocab_size
    logger.info(
        "FRSPEC drafts over %d of %d tokens (%.0f%%), from %s",
        len(fitted.ids),
        target.vocab_size,
        100 * share,
        path,
    )
    if fitted.added:
        names = target.vocabulary.by_id if target.vocabulary else {}
        listed = ", ".join(f"{i} {names[i]!r}" if i in names else str(i) for i in fitted.added)
        logger.warning(
            "FRSPEC added ids that the map lacks but generation can emit (end of turn, special"
            " tokens): %s. Each took the place of the lowest ranked id",
            listed,
        )
    if target.vocabulary is None:
        logger.warning(
            "FRSPEC found no tokenizer files of the model on this machine: that the map belongs to"
            " this tokenizer was not checked"
        )


def _vocabulary(server_args: Any) -> Vocabulary | None:
    name = server_args.tokenizer_path or server_args.model_path
    folder = Path(name)
    if not folder.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer.json", revision=server_args.revision)
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    try:
        file = tokenizer_file(folder)
    except TokenMapError:
        return None
    return read_vocabulary(file)
