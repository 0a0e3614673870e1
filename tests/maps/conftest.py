"""A small real BPE tokenizer with special, tool and reserved tokens, made on the spot."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "the cat sat on the mat and the dog sat on the log",
    "def add(a, b):\n    return a + b\n",
    "Überraschung für alle, 12345 Äpfel und ein paar Birnen",
    "你好,世界。这是一个测试。",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, eos: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if eos:
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.add_special_tokens(["<|reserved_0|>", "<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE} | ({"eos_token": "<|im_end|>"} if eos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))
