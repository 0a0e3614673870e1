import numpy as np
import pytest

from sgl_frspec.maps import MapMetadata, TokenMap, TokenMapError


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_negative_id_is_named():
    with pytest.raises(TokenMapError, match=r"entry 2 is negative \(-4\)"):
        TokenMap(ids(1, 2, -4, 3))


def test_duplicate_is_named_with_both_places():
    with pytest.raises(TokenMapError, match="id 7 is at entries 1 and 3"):
        TokenMap(ids(1, 7, 2, 7))


def test_id_outside_the_vocabulary_is_named():
    with pytest.raises(TokenMapError, match="entry 1 is id 10, outside the vocabulary of 10"):
        TokenMap(ids(9, 10), metadata=MapMetadata(vocab_size=10))


def test_empty_list():
    with pytest.raises(TokenMapError, match="holds no ids; make one with `frspec rank`"):
        TokenMap(ids())


def test_two_dimensional_ids():
    with pytest.raises(TokenMapError, match=r"shape \[2, 1\]; a map is one flat list"):
        TokenMap(np.array([[1], [2]], dtype=np.int64))


def test_float_ids():
    with pytest.raises(TokenMapError, match="ids have type float32; store whole numbers"):
        TokenMap(np.array([1, 2], dtype=np.float32))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "counts", [np.array([1]), np.array([1.0, 2.0]), np.array([[1, 2]]), np.array([3, -1])]
)
def test_counts_must_stand_beside_the_ids(counts: np.ndarray):
    with pytest.raises(TokenMapError, match="count"):
        TokenMap(ids(1, 2), counts)


def test_first_keeps_rank_order_counts_and_metadata():
    metadata = MapMetadata(vocab_size=9, required_ids=(8,), total_count=30)
    cut = TokenMap(ids(8, 3, 1, 5), ids(0, 20, 9, 1), metadata).first(2)
    assert cut.ids.tolist() == [8, 3]
    assert cut.counts is not None
    assert cut.counts.tolist() == [0, 20]
    assert cut.metadata == metadata


def test_first_refuses_to_drop_a_required_id():
    token_map = TokenMap(ids(3, 8, 1), metadata=MapMetadata(required_ids=(3, 8)))
    with pytest.raises(TokenMapError, match="size 1 would drop required id 8"):
        token_map.first(1)


@pytest.mark.parametrize("size", [0, 4, -1])
def test_first_refuses_sizes_that_the_map_does_not_have(size: int):
    with pytest.raises(TokenMapError, match="choose a size from 1 to 3"):
        TokenMap(ids(3, 8, 1)).first(size)
