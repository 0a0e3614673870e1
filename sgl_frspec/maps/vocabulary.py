"""A model's tokenizer files: which ids exist, which end a turn, which are never generated."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgl_frspec.maps.files import PathLike
from sgl_frspec.maps.fingerprint import fingerprint_of_tokens
from sgl_frspec.maps.token_map import TokenMapError

# Ends of turn that instruction-tuned models emit; some are missing from their configuration files.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|end|>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)
# Free slots, padding, and marks of media in the input: no language model generates them.
PLACEHOLDER = re.compile(
    r"reserved|unused|place.?holder|extra_id|image|audio|video|vision|^\W*_?pad(ding)?_?\W*$", re.I
)


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a map needs to know of a tokenizer, read from its files without loading it.

    Attributes:
        tokens: token -> id, added tokens included, as spelled in ``tokenizer.json``.
        eos_ids: ids that end a generation or a turn, in the order found.
        required_ids: ``eos_ids``, then every other special, tool or think token.
        placeholder_ids: slots that are never generated.
        model_vocab_size: rows of the LM head where ``config.json`` says so; may exceed ``size``.
    """

    path: Path
    name: str
    tokens: dict[str, int]
    eos_ids: tuple[int, ...]
    required_ids: tuple[int, ...]
    placeholder_ids: frozenset[int]
    model_vocab_size: int | None

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokens.values()) + 1

    @property
    def byte_level(self) -> bool:
        """Whether tokens spell raw bytes, as opposed to SentencePiece's spelling."""
        return "<0x0A>" not in self.tokens and "▁" not in self.tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """See :func:`sgl_frspec.maps.tokenizer_fingerprint`."""
        return fingerprint_of_tokens(self.tokens)

    @functools.cached_property
    def by_id(self) -> dict[int, str]:
        """id -> token; where two tokens share an id, the one that sorts last."""
        return {index: token for token, index in sorted(self.tokens.items())}


def read_vocabulary(path: PathLike) -> Vocabulary:
    """Read the tokenizer in a model folder, a ``tokenizer.json``, or a tiktoken rank file.

    Raises:
        TokenMapError: there is no such file, or it is damaged.
    """
    path = tokenizer_file(path)
    if path.suffix == ".json":
        data = read_json(path)
        tokens, added = _hugging_face_tokens(data, path)
    else:
        from sgl_frspec.maps.tiktoken_files import tiktoken_tokens

        tokens, added = tiktoken_tokens(path), []
    if not tokens:
        raise TokenMapError(f"{path}: holds no tokens; give the model's own tokenizer file")
    special = {token: index for token, index, is_special in added if is_special}
    eos_ids = tuple(dict.fromkeys(_eos_ids(path.parent, tokens, special)))
    placeholders = frozenset(i for token, i, _ in added if PLACEHOLDER.search(token))
    specials = sorted(i for token, i, special in added if special or token.startswith("<"))
    required = dict.fromkeys((*eos_ids, *(i for i in specials if i not in placeholders)))
    return Vocabulary(
        path=path,
        name=path.parent.name if path.name == "tokenizer.json" else path.stem,
        tokens=tokens,
        eos_ids=eos_ids,
        required_ids=tuple(required),
        placeholder_ids=placeholders - set(eos_ids),
        model_vocab_size=_model_vocab_size(path.parent),
    )


def required_token_ids(model_dir: PathLike) -> tuple[int, ...]:
    """Every id that a draft must be able to propose: end of turn, then special and tool tokens.

    Raises:
        TokenMapError: no tokenizer file is there, or it is damaged.
    """
    return read_vocabulary(model_dir).required_ids


def tokenizer_file(path: PathLike) -> Path:
    """The tokenizer file that ``path`` is or holds."""
    path = Path(path)
    if path.is_file():
        return path
    for pattern in ("tokenizer.json", "*.tiktoken", "tiktoken.model", "*/tiktoken.model"):
        found = sorted(path.glob(pattern)) if path.is_dir() else []
        if found:
            return found[0]
    raise TokenMapError(
        f"{path}: no tokenizer.json or tiktoken file there; give a local model folder or tokenizer"
        " file (nothing is downloaded)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenMapError(f"{path}: not valid JSON ({error}); copy it again") from error
    if not isinstance(data, dict):
        raise TokenMapError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _hugging_face_tokens(
    data: dict[str, Any], path: Path
) -> tuple[dict[str, int], list[tuple[str, int, bool]]]:
    try:
        vocab = data["model"]["vocab"]
        # Unigram models list [token, score] pairs in id order.
        tokens = dict(vocab) if isinstance(vocab, dict) else {t[0]: i for i, t in enumerate(vocab)}
        added = [
            (a["content"], int(a["id"]), bool(a.get("special")))
            for a in data.get("added_tokens") or ()
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise TokenMapError(
            f"{path}: not a Hugging Face tokenizer.json ({error!r}); give the model's own file"
        ) from error
    tokens.update({token: index for token, index, _ in added})
    return tokens, added


def _eos_ids(folder: Path, tokens: dict[str, int], special: dict[str, int]) -> Iterator[int]:
    largest = max(tokens.values())
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        for index in value if isinstance(value, list) else [value]:
            if isinstance(index, int) and 0 <= index <= largest:
                yield index
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if name in tokens:
        yield tokens[name]
    # Only special tokens: `</s>` is also how HTML strikes text, a plain token of some vocabularies.
    for candidate in END_OF_TURN:
        if candidate in special:
            yield special[candidate]


def _model_vocab_size(folder: Path) -> int | None:
    config = read_json(folder / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None
