from dyad.data.loading.sample_rng import uniforms


def test_numbers_differ_by_seed_epoch_and_id_and_repeat() -> None:
    rows = {(s, e, i): tuple(uniforms(s, e, i, 4)) for s in (0, 1, -1) for e in (0, 1) for i in (0, 1, 2**40)}
    assert len(set(rows.values())) == len(rows)
    assert all(tuple(uniforms(*key, 4)) == row for key, row in rows.items())
    assert tuple(uniforms(0, 0, 0, 8)[:4]) == rows[0, 0, 0]
    assert all(0 <= number < 1 for row in rows.values() for number in row)
