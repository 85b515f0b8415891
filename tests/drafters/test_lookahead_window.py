"""The window of lookahead decoding by hand: what is where, what sees what, how it moves, and what is kept of it."""

from random import Random

from specdraft.drafters.lookahead_window import NgramPool, Window, places, sees

# Three columns and n-grams of four tokens: the newest row first, behind them what row 0 has beside the last token.
#   row 2     .  .  2  3  4          positions behind the last token: row + column
#   row 1     .  1  2  3
#   row 0    (0) 1  2
PLACES = [(2, 0), (2, 1), (2, 2), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]
SEEN = ["x..x....", ".x..x.x.", "..x..xxx", "...x....", "....x.x.", ".....xxx", "......x.", "......xx"]


def test_a_place_sees_row_0_up_to_its_column_and_its_own_column_above():
    assert list(places(3, 4)) == PLACES
    assert ["".join(".x"[sees(one, other)] for other in PLACES) for one in PLACES] == SEEN
    for one in PLACES:  # of every position behind the last token one token, up to itself
        assert sorted(sum(other) for other in PLACES if sees(one, other)) == list(range(1, 1 + sum(one)))


def test_the_window_moves_on_with_the_text_and_loses_its_oldest_row():
    window, drawn = Window([7, 8, 9], 5, 3, 4), Random(0).choices([7, 8, 9], k=9)
    rows = [[5, *drawn[1:3]], drawn[3:6], drawn[6:]]
    assert window.rows == rows
    found = window.move([20, 21, 22], [30])  # nothing was accepted
    assert found == list(zip(*rows, [20, 21, 22], strict=True))
    assert window.rows == [[30, *rows[1][1:]], rows[2], [20, 21, 22]]
    window.move([40, 41, 42], [50, 51])
    assert window.rows[0][:2] == [51, rows[2][2]] and window.rows[1][:2] == [21, 22] and window.rows[2][:2] == [41, 42]
    assert {row[2] for row in window.rows} <= {7, 8, 9}
    window.move([1, 2, 3], [60, 61, 62, 63, 64, 65])  # farther than the window reaches
    assert window.rows[0][0] == 65 and {len(row) for row in window.rows} == {3}
    assert {token for row in window.rows for token in row} <= {65, 7, 8, 9}


def test_the_pool_keeps_the_newest_of_every_token():
    pool = NgramPool(2)
    for ngram in ([1, 5, 6], [1, 7, 8], [2, 5, 6], [1, 5, 6]):
        pool.add(ngram)
    assert pool.after(1) == [(5, 6), (7, 8)] and pool.after(2) == [(5, 6)] and pool.after(3) == []
    pool.add([1, 9, 9])
    assert pool.after(1) == [(9, 9), (5, 6)]
