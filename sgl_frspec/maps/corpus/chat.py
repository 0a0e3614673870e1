"""Chat messages -> the text that the model reads or, by default, only what it writes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_frspec.maps.token_map import TokenMapError
from sgl_frspec.maps.vocabulary import read_json

Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """A tokenizer's chat template, as in its ``tokenizer_config.json`` or ``chat_template.jinja``.

    Args:
        text: the Jinja template.
        tokens: ``bos_token`` and the like, which templates refer to by name.

    Raises:
        TokenMapError: the template is not valid.
    """

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        self.text = text
        self._render = _compile(text)
        self._tokens = tokens

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The whole conversation as the model sees it."""
        return self._render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **self._tokens
        )

    def assistant_parts(self, messages: Messages) -> list[str]:
        """What the model itself wrote: each assistant turn with the token that ends it.

        A turn is what it adds to the conversation before it. A template that rewrites earlier turns
        (as those that drop old reasoning do) is given the conversation up to that turn only.
        """
        parts = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = self.render(messages[: i + 1])
            shared = _shared_prefix(before, after)
            parts.append(after[shared:])
        return parts


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The chat template in ``file``, else the one beside the tokenizer, else None."""
    config = read_json(folder / "tokenizer_config.json")
    candidates = [file] if file else [folder / "chat_template.jinja"]
    text = next((p.read_text() for p in candidates if p.is_file()), None)
    if text is None and file is not None:
        raise TokenMapError(f"{file}: no such chat template file")
    if text is None:
        text = _default(config.get("chat_template"))
    if text is None:
        return None
    return ChatTemplate(text, _special_tokens(config))


def _default(template: Any) -> str | None:
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        return named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        tokens[name] = value if isinstance(value, str) else ""
    return tokens


def _shared_prefix(before: str, after: str) -> int:
    if after.startswith(before):
        return len(before)
    # The generation prompt differs from a finished turn (an empty think block, say).
    return next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after)
    )


def _compile(text: str) -> Callable[..., str]:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    # A date would make the counts depend on the day; templates fall back to a fixed one without it.
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise TokenMapError(f"the chat template is not valid Jinja ({error})") from error

    def render(**values: Any) -> str:
        try:
            return template.render(**values)
        except (TemplateError, TypeError) as error:
            roles = [str(m.get("role")) for m in values["messages"]]
            raise TokenMapError(
                f"the chat template refuses a conversation with roles {roles} ({error}); remove it"
                " from the source, or count a text field instead"
            ) from error

    return render


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
