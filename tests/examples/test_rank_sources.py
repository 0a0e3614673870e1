"""What the map is ranked by, and the committed map."""

import gzip
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.smollm2_135m.evaluate_draft import FOLDER
from examples.smollm2_135m.rank_sources import distinct_texts, write_documents
from sgl_frspec.maps import fit_token_map, load_token_map, tokenizer_fingerprint

LONG = "a text that is long enough to be counted, number "


def test_each_longer_text_once_and_no_system_message() -> None:
    lines = [
        json.dumps({"0": LONG + "1", "1": LONG + "2", "type": "short"}),
        json.dumps({"input": [{"role": "system", "content": LONG + "3"}]}),
        json.dumps({"input": [{"role": "user", "content": LONG + "2"}], "ideal": [LONG + "4"]}),
    ]
    assert list(distinct_texts(lines)) == [LONG + "1", LONG + "2", LONG + "4"]


def test_same_sources_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_documents(tmp_path / name, "text", ["one", "zwei ß"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with gzip.open(tmp_path / "a", "rt", encoding="utf-8") as f:
        assert [json.loads(line) for line in f] == [{"text": "one"}, {"text": "zwei ß"}]


def test_committed_map_fits_the_model(smollm2: Path) -> None:
    token_map = load_token_map(FOLDER / "token_map.safetensors")
    assert sorted(token_map.ids.tolist()) == list(range(49152))
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert token_map.ids[0] == tokenizer.token_to_id("<|im_end|>")
    assert token_map.counts is not None
    ranked = token_map.counts[len(token_map.metadata.required_ids) :].tolist()
    assert ranked == sorted(ranked, reverse=True)
    fitted = fit_token_map(
        token_map,
        vocab_size=49152,
        size=16384,
        required_ids=(2,),
        min_size=16,
        tokenizer_fingerprint=tokenizer_fingerprint(smollm2),
    )
    assert (len(fitted.ids), len(fitted.added)) == (16384, 0)
    common = [tokenizer.get_vocab()[t] for t in ("Ġthe", "Ċ", ".", "Ġreturn", "1", "def")]
    assert np.isin(common, token_map.ids[:512]).all()
