"""What kind of text each token of a vocabulary is: its script, or else its category."""

import unicodedata
from collections import Counter

from sgl_frspec.maps.byte_alphabet import token_bytes
from sgl_frspec.maps.vocabulary import Vocabulary

# First words of Unicode character names that do not name the script as people call it.
_SCRIPTS = {
    "CJK": "Chinese characters",
    "HIRAGANA": "Japanese kana",
    "KATAKANA": "Japanese kana",
    "HANGUL": "Korean",
    "FULLWIDTH": "Latin",
    "HALFWIDTH": "Japanese kana",
    "KATAKANA-HIRAGANA": "Japanese kana",
    "MATHEMATICAL": "Latin",
    "FEMININE": "Latin",
    "MASCULINE": "Latin",
    "MICRO": "Greek",
    **dict.fromkeys(("COMBINING", "MODIFIER", "VARIATION", "OTHER"), "other letters"),
}
SPECIAL, FRAGMENT, SPACE = "special tokens", "pieces of characters", "white space"
DIGITS, SYMBOLS = "digits", "punctuation and symbols"


def token_category(data: bytes) -> str:
    """The script of the letters in a token's bytes, or what it consists of when it has none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return FRAGMENT
    letters = Counter(_script(ch) for ch in text if unicodedata.category(ch)[0] in "LM")
    if letters:
        return letters.most_common(1)[0][0]
    if any(ch.isdigit() for ch in text):
        return DIGITS
    return SPACE if not text.strip() else SYMBOLS


def id_categories(vocabulary: Vocabulary) -> dict[int, str]:
    """The category of every id that the tokenizer knows."""
    special = {*vocabulary.required_ids, *vocabulary.placeholder_ids}
    byte_level = vocabulary.byte_level
    return {
        index: SPECIAL
        if index in special
        else token_category(token_bytes(token, byte_level=byte_level))
        for index, token in vocabulary.by_id.items()
    }


def _script(letter: str) -> str:
    word = unicodedata.name(letter, "OTHER").split()[0]
    return _SCRIPTS.get(word, word.capitalize())
