"""Which tokenizer a map belongs to: a hash of every (token, id) pair."""

import hashlib
from collections.abc import Mapping

from sgl_frspec.maps.files import PathLike


def tokenizer_fingerprint(model_dir_or_tokenizer_json: PathLike) -> str:
    """sha256 over a tokenizer's sorted (id, token) pairs, added tokens included.

    The same for every file that maps the same tokens to the same ids: formatting, key order and
    whether a token is listed as added or in the base vocabulary do not matter.

    Raises:
        TokenMapError: no tokenizer file is there, or it is damaged.
    """
    from sgl_frspec.maps.vocabulary import read_vocabulary

    return read_vocabulary(model_dir_or_tokenizer_json).fingerprint


def fingerprint_of_tokens(tokens: Mapping[str, int]) -> str:
    """The fingerprint of a vocabulary given as token -> id, as by ``Tokenizer.get_vocab()``."""
    digest = hashlib.sha256()
    for index, token in sorted((index, token) for token, index in tokens.items()):
        # The length keeps tokens that hold digits or separators from running together.
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (index, len(encoded)))
        digest.update(encoded)
    return digest.hexdigest()
