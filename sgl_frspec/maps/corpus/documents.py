"""Records of each format -> documents: text, token ids, or chat messages."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from sgl_frspec.maps.corpus.logs import finished_output
from sgl_frspec.maps.corpus.streams import Utf8Decoder, text_blocks, text_lines
from sgl_frspec.maps.token_map import TokenMapError

# Text, or token ids, or chat messages with a role and a content each.
Document = str | list[int] | list[dict[str, Any]]

# Where a record names no field: what data sets commonly call it, the most telling first.
USUAL_FIELDS = ("messages", "conversations", "output_ids", "token_ids", "text", "content")
# ShareGPT's names for the roles.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
# The tokenizer's time and memory per character grow with a document's length; text is cut into
# pieces about this long where a line, or else a word, ends.
PIECE_CHARS = 1 << 14


def read_documents(
    stream: BinaryIO, file_format: str, field: str | None, name: str
) -> Iterator[Document]:
    """The documents in an unpacked file of any format but parquet.

    Raises:
        TokenMapError: naming the file, the line and what was expected there.
    """
    decoder = Utf8Decoder(name)
    if file_format == "text":
        carry = ""
        for block in text_blocks(stream, decoder):
            *pieces, carry = split_text(carry + block)
            yield from pieces
        yield from (piece for piece in [carry] if piece)
        return
    for number, line in text_lines(stream, decoder):
        if file_format == "log":
            document = finished_output(line)
            if document:
                yield document
        elif file_format == "ids" and not line.startswith(("[", "{")):
            yield _whitespace_ids(line, f"{name}: line {number}")
        else:
            yield record_document(_parse(line, name, number), field, f"{name}: line {number}")


def record_document(record: Any, field: str | None, where: str) -> Document:
    """The document in one record: the value of ``field``, or of the first usual field it has.

    Raises:
        TokenMapError: there is no such field, or it holds neither text, ids nor messages.
    """
    value = record
    if isinstance(record, dict):
        names = [field] if field else [name for name in USUAL_FIELDS if name in record]
        if not names or names[0] not in record:
            raise TokenMapError(
                f"{where}: no field {field or ' or '.join(USUAL_FIELDS)!r}; it has"
                f" {', '.join(map(repr, record)) or 'no fields'}: name one with field=NAME"
            )
        value = record[names[0]]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [_message(item, where) for item in value]
    raise TokenMapError(
        f"{where}: holds {str(value)!r:.60}; expected text, a list of token ids or chat messages"
    )


def split_text(text: str) -> list[str]:
    """``text`` in pieces of at most :data:`PIECE_CHARS`; joined they are ``text`` again."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARS:
        end = _boundary(text, start + PIECE_CHARS // 2, start + PIECE_CHARS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _boundary(text: str, low: int, high: int) -> int:
    """The last place in ``(low, high]`` where a line ends, else a word, else ``high``.

    White space stays with what precedes a new line and goes with the word it leads, because that is
    how vocabularies form tokens.
    """
    end = high
    while (newline := text.rfind("\n", low, end)) >= 0:
        if newline + 1 < len(text) and not text[newline + 1].isspace():
            return newline + 1
        end = newline
    space = text.rfind(" ", low, high)
    return space if space > low else high


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    if "from" in item and "value" in item:
        role = str(item["from"])
        return {"role": _ROLES.get(role, role), "content": item["value"]}
    if "role" not in item:
        raise TokenMapError(f"{where}: a message has no 'role' but {', '.join(map(repr, item))}")
    return item


def _parse(line: str, name: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; a JSON array is not JSONL: write one record a line" if number == 1 else ""
        raise TokenMapError(f"{name}: line {number} is not JSON ({error}){hint}") from error


def _whitespace_ids(line: str, where: str) -> list[int]:
    try:
        return [int(word) for word in line.split()]
    except ValueError as error:
        raise TokenMapError(f"{where}: {error}; expected token ids") from error
