import numpy as np
import pytest

from sgl_frspec.maps import MapMetadata, TokenMap, TokenMapError, fit_token_map


def ranked(*values: int, **metadata: object) -> TokenMap:
    return TokenMap(np.array(values, dtype=np.int64), metadata=MapMetadata(**metadata))  # pyright: ignore[reportArgumentType]


def test_ids_come_out_ascending():
    fitted = fit_token_map(ranked(9, 2, 7, 4), vocab_size=10, size=3)
    assert fitted.ids.tolist() == [2, 7, 9]
    assert fitted.ids.dtype == np.int64
    assert fitted.added == ()


def test_missing_required_id_replaces_the_lowest_ranked_and_is_reported():
    fitted = fit_token_map(ranked(9, 2, 7, 4), vocab_size=10, size=3, required_ids=[0, 2])
    assert fitted.ids.tolist() == [0, 2, 9]
    assert fitted.added == (0,)


def test_lowest_ranked_stays_if_it_is_required_itself():
    fitted = fit_token_map(ranked(9, 2, 7), vocab_size=10, required_ids=[7, 5])
    assert fitted.ids.tolist() == [5, 7, 9]
    assert fitted.added == (5,)


def test_required_ids_of_the_map_are_kept_too():
    fitted = fit_token_map(ranked(8, 2, 7, required_ids=(8,)), vocab_size=10, size=1)
    assert fitted.ids.tolist() == [8]


def test_all_of_the_map_may_be_replaced_by_required_ids():
    fitted = fit_token_map(ranked(1, 2), vocab_size=10, required_ids=[3, 4])
    assert fitted.ids.tolist() == [3, 4]
    assert fitted.added == (3, 4)


def test_fewer_ids_than_top_k():
    with pytest.raises(TokenMapError, match="has 2 ids, fewer than top-k 4"):
        fit_token_map(ranked(1, 2), vocab_size=10, min_size=4)


def test_id_outside_the_models_vocabulary():
    with pytest.raises(TokenMapError, match="entry 1 is id 12, outside the vocabulary of 10"):
        fit_token_map(ranked(1, 12), vocab_size=10)


def test_another_tokenizers_fingerprint():
    token_map = ranked(1, 2, tokenizer_fingerprint="aa" * 32, tokenizer="llama3")
    with pytest.raises(TokenMapError, match=r"another tokenizer \(llama3.*rank a map with this"):
        fit_token_map(token_map, vocab_size=10, tokenizer_fingerprint="bb" * 32)


@pytest.mark.parametrize("size", [0, -3, 5])
def test_size_that_the_map_does_not_have(size: int):
    with pytest.raises(TokenMapError, match=f"size {size} asked of a map with 4 ids"):
        fit_token_map(ranked(1, 2, 3, 4), vocab_size=10, size=size)


def test_more_required_ids_than_the_size():
    with pytest.raises(TokenMapError, match="size 1 cannot hold the 2 required ids"):
        fit_token_map(ranked(1, 2), vocab_size=10, size=1, required_ids=[1, 2])


@pytest.mark.parametrize("bad", [-1, 10])
def test_required_id_outside_the_vocabulary(bad: int):
    with pytest.raises(TokenMapError, match=f"required id {bad} is outside"):
        fit_token_map(ranked(1, 2), vocab_size=10, required_ids=[bad])
