"""How byte-level vocabularies spell raw bytes: one printable character for each of the 256."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

# GPT-2's convention: bytes that print as themselves keep their code point, the rest follow from
# U+0100.
BYTE_TO_CHAR: dict[int, str] = {
    **{byte: chr(byte) for byte in _PRINTABLE},
    **{byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)},
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def spell_bytes(data: bytes) -> str:
    """Raw bytes in the alphabet of a byte-level vocabulary."""
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def token_bytes(token: str, *, byte_level: bool) -> bytes:
    """What an entry of a vocabulary stands for.

    Args:
        token: as spelled in ``tokenizer.json``.
        byte_level: True where every character spells a byte, False for SentencePiece's spelling
            (``▁`` for a space, ``<0xNN>`` for a byte). Not to be told from one token: ``é`` is a
            letter in the one and half of one in the other.
    """
    if not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    if byte_level and all(char in CHAR_TO_BYTE for char in token):
        return bytes(CHAR_TO_BYTE[char] for char in token)
    return token.replace("▁", " ").encode("utf-8", "surrogatepass")
