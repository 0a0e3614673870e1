"""What a result says about the code that made it."""

from bench.environment import sources_digest


def test_the_digest_follows_every_byte_and_name_of_the_sources(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 2\n")
    (tmp_path / "notes.txt").write_text("not code")
    first = sources_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("still not code")
    assert sources_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = sources_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({first, changed, sources_digest(tmp_path)}) == 3
