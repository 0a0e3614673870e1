"""Documents -> counts of token ids. What each worker process runs."""

from typing import TYPE_CHECKING

import numpy as np

from sgl_frspec.maps.corpus.chat import ChatTemplate
from sgl_frspec.maps.corpus.documents import Document, split_text
from sgl_frspec.maps.token_map import Ids, TokenMapError
from sgl_frspec.maps.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROLES = ("assistant", "all")


class DocumentCounter:
    """Counts the token ids of documents.

    Args:
        tokenizer: encodes text; special tokens are counted where the text spells them.
        template: renders chat messages; None if the tokenizer has none.
        roles: ``assistant`` counts what the model wrote, ``all`` the whole conversation.
        vocab_size: ids at or above it are refused in token-id documents and ignored from text.
    """

    def __init__(
        self, tokenizer: "Tokenizer", template: ChatTemplate | None, roles: str, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._roles = roles
        self._vocab_size = vocab_size

    def count(self, documents: list[Document]) -> tuple[Ids, Ids]:
        """The distinct ids in ``documents``, ascending, and how often each occurs; int64 both.

        Raises:
            TokenMapError: messages without a template, or a token id outside the vocabulary.
        """
        texts: list[str] = []
        parts: list[Ids] = []
        for document in documents:
            if isinstance(document, str):
                texts += split_text(document)
            elif document and isinstance(document[0], int):
                parts.append(self._checked(np.asarray(document, dtype=np.int64)))
            elif document:
                texts += [piece for part in self._chat(document) for piece in split_text(part)]
        parts += self._encode(texts)
        ids = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
        counts = np.bincount(ids, minlength=self._vocab_size)[: self._vocab_size]
        distinct = np.flatnonzero(counts)
        return distinct, counts[distinct]

    def _encode(self, texts: list[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _chat(self, messages: list) -> list[str]:
        if self._template is None:
            raise TokenMapError(
                "the source holds chat messages but the tokenizer has no chat template; pass"
                " --chat-template FILE, or count a text field with field=NAME"
            )
        if self._roles == "all":
            return [self._template.render(messages)]
        return self._template.assistant_parts(messages)

    def _checked(self, ids: Ids) -> Ids:
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        if bad.size:
            raise TokenMapError(
                f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}; the ids come"
                " from another tokenizer"
            )
        return ids


def load_tokenizer(vocabulary: Vocabulary) -> "Tokenizer":
    """The tokenizer itself, without truncation or padding.

    Raises:
        TokenMapError: the file is not one that ``tokenizers`` can load.
    """
    if vocabulary.path.suffix != ".json":
        from sgl_frspec.maps.tiktoken_files import tiktoken_tokenizer

        return tiktoken_tokenizer(vocabulary.path)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(vocabulary.path))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenMapError(f"{vocabulary.path}: cannot be loaded ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
