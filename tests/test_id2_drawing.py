"""One search as HTML: what is said, what is framed, and pictures that decode."""

from __future__ import annotations

import base64
import io
import re

import pytest
import torch
from icml25.core import make_generator
from icml25.id2.drawing import Found, search_frame
from PIL import Image


def flat(level):
    """A grey picture: survives WebP, and tells which one it is."""
    return torch.full((3, 8, 8), level)


def frame(**found):
    found = found or {"raw": Found(2.0, [flat(0.2), flat(0.8)], [False, True])}
    return search_frame(
        flat(0.0), flat(1.0), found, caption='"a cup", by <F>', gallery_size=1018
    )


def pictures(markup):
    found = re.findall(r"data:image/webp;base64,([^\"]+)", markup)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_pictures_stand_in_their_order_with_clear_gaps():
    pair, row = pictures(frame())
    assert pair.size == row.size == (20, 10)  # two of 8 pixels, 1 clear around each
    for image, levels in ((pair, (0, 255)), (row, (51, 204))):
        assert image.getpixel((0, 5))[3] == image.getpixel((10, 5))[3] == 0
        for x, level in zip((5, 15), levels, strict=True):
            *grey, opaque = image.getpixel((x, 5))
            assert opaque == 255
            assert all(abs(value - level) < 8 for value in grey)  # lossy


def test_the_true_origin_is_framed_where_it_stands_and_said_in_words():
    markup = frame()
    (left,) = re.findall(r"inset:0 auto 0 ([\d.]+)%", markup)
    assert float(left) == 50  # the second of two
    assert "raw: true origin at place 2 of 1,018" in markup
    assert "true origin framed" in markup


def test_an_origin_that_is_not_found_is_said_to_be_missing():
    markup = frame(W=Found(7.5, [flat(0.2), flat(0.8)], [False, False]))
    assert "inset:" not in markup
    assert "W: true origin at place 7.5 of 1,018" in markup
    assert "true origin not among them" in markup


def test_each_method_gets_a_row():
    row = Found(1.0, [flat(0.5)] * 5, [True] + [False] * 4)
    assert len(pictures(frame(raw=row, W=row))) == 3


def test_words_of_the_reader_are_escaped():
    assert "by <F>" not in frame()
    assert "by &lt;F&gt;" in frame()
    for alt in re.findall(r'alt="([^"]*)"', frame()):
        assert alt


def test_the_same_search_is_the_same_text():
    noise = [torch.rand(3, 8, 8, generator=make_generator(k)) for k in range(2)]
    first, second = (frame(raw=Found(1.0, noise, [True, False])) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "at least one method"),
        ({"raw": Found(1.0, [], [])}, "as many in each, at least one"),
        (
            {
                "raw": Found(1.0, [flat(0.5)], [True]),
                "W": Found(1.0, [flat(0.5)] * 2, [True, False]),
            },
            "as many in each",
        ),
        ({"raw": Found(1.0, [flat(0.5)], [True, False])}, "2 marks for 1 pictures"),
    ],
)
def test_searches_that_do_not_fit_are_refused(found, message):
    with pytest.raises(ValueError, match=message):
        search_frame(flat(0.0), flat(1.0), found, caption="", gallery_size=2)
