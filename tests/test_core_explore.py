"""The interactive figure: frames, links, text form, budget."""

import base64
import io

import ipywidgets as widgets
import matplotlib.pyplot as plt
import pytest
from icml25.core import explore
from icml25.core.explore import MAX_BYTES
from PIL import Image


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("ICML25_QUIET", "1")
    yield
    plt.close("all")


def text(**arguments):
    return f"<p>{arguments}</p>"


def drawing(n, **_):
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.plot([0, n])
    return figure


def visible(figure):
    """The frame a reader sees, following the stacks as the browser does."""
    node = figure.children[-1]
    while isinstance(node, widgets.Stack):
        node = node.children[node.selected_index]
    return node.value


def test_one_axis_has_a_slider_and_a_frame_per_value():
    figure = explore(text, n=[1, 2, 3])
    slider, stack = figure.children
    assert isinstance(slider, widgets.SelectionSlider)
    assert [frame.value for frame in stack.children] == [text(n=n) for n in (1, 2, 3)]


def test_texts_get_buttons():
    figure = explore(text, kind=["SVD", "random"])
    assert isinstance(figure.children[0], widgets.ToggleButtons)


def test_two_axes_show_the_frame_of_both_values():
    figure = explore(text, a=[1, 2], b=["x", "y", "z"], start={"a": 2, "b": "y"})
    assert visible(figure) == text(a=2, b="y")


def test_second_control_is_linked_to_every_row():
    figure = explore(text, a=[1, 2, 3], b=[4, 5])
    second = figure.children[1]
    assert sum(link.source[0] is second for link in figure.links) == 3


def test_every_link_joins_index_to_selected_index():
    figure = explore(text, a=[1, 2], b=[4, 5])
    assert len(figure.links) == 3
    for link in figure.links:
        assert (link.source[1], link.target[1]) == ("index", "selected_index")


def test_html_may_have_six_controls_and_each_reaches_every_frame():
    names = ("a", "b", "c", "d", "e", "f")
    figure = explore(text, **dict.fromkeys(names, [1, 3]), start={"c": 3})
    assert visible(figure) == text(**dict.fromkeys(names, 1) | {"c": 3})
    for control in figure.children[:-1]:
        control.index = 1 - control.index
        for link in figure.links:  # as the browser follows them
            if link.source[0] is control:
                link.target[0].selected_index = control.index
    assert visible(figure) == text(**dict.fromkeys(names, 3) | {"c": 1})


def test_pictures_may_not_have_three_controls():
    with pytest.raises(ValueError, match="at most 2 for figures"):
        explore(drawing, n=[1, 2], b=[1, 2], c=[1, 2])


def test_controls_carry_label_and_unit():
    figure = explore(text, n=[1, 2], labels={"n": "noise level"}, units={"n": "dB"})
    slider = figure.children[0]
    assert slider.description == "noise level"
    assert [label for label, _ in slider.options] == ["1 dB", "2 dB"]


def test_text_form_is_one_stable_line():
    bundle = explore(text, n=[1, 2])._repr_mimebundle_()
    assert bundle["text/plain"] == "[figure with 2 frames, at n = 1]"


def test_a_still_picture_is_stored_beside_the_widget():
    bundle = explore(drawing, n=[1, 2])._repr_mimebundle_()
    assert bundle["image/png"].startswith("iVBORw0KGgo")


def test_drawings_become_images_with_alternative_text_and_are_closed():
    figure = explore(drawing, n=[1, 2], alt=lambda n: f'a "line" to {n}')
    assert 'alt="a &quot;line&quot; to 1"' in visible(figure)
    assert "data:image/svg+xml;base64," in visible(figure)
    assert not plt.get_fignums()


def test_a_palette_makes_sharper_pictures_of_fewer_bytes():
    frames = []
    for colors in (None, 64):
        figure = explore(drawing, n=[1, 2], image="png", colors=colors)
        data = base64.b64decode(visible(figure).partition("base64,")[2].split('"')[0])
        frames.append((len(data), Image.open(io.BytesIO(data))))
    (plain, first), (few, second) = frames
    assert few < plain and second.width > first.width and second.mode == "P"
    for colors, image in ((1, "png"), (257, "png"), (64, "svg")):
        with pytest.raises(ValueError, match=f"colors={colors}"):
            explore(drawing, n=[1, 2], image=image, colors=colors)


def test_same_figure_same_frame():
    first, second = (visible(explore(drawing, n=[1, 2])) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "give at least one"),
        (dict.fromkeys("abcdefg", [1, 2]), "at most 6 for HTML"),
        ({"a": [1]}, "axis a=.* at least two"),
        ({"a": list(range(65))}, "65 frames; at most 64 of HTML"),
        ({"a": list(range(9)), "b": list(range(9))}, "81 frames; at most 64 of HTML"),
    ],
)
def test_bad_axes_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        explore(text, **axes)


def test_pictures_have_fewer_frames():
    with pytest.raises(ValueError, match="49 frames; at most 40 of figures"):
        explore(lambda a, b: drawing(a), a=list(range(7)), b=list(range(7)))


def test_start_must_be_a_value():
    with pytest.raises(ValueError, match="start a=3 is not one of"):
        explore(text, a=[1, 2], start={"a": 3})


@pytest.mark.parametrize("argument", ["labels", "units", "start"])
def test_unknown_axis_names_are_refused(argument):
    with pytest.raises(ValueError, match=f"{argument} names .'b'."):
        explore(text, a=[1, 2], **{argument: {"b": 1}})


def test_bad_image_kind_is_refused():
    with pytest.raises(ValueError, match="image='gif'"):
        explore(text, a=[1, 2], image="gif")


def test_frames_have_a_budget():
    with pytest.raises(ValueError, match="at most 1,000,000 are stored"):
        explore(lambda n: "x" * MAX_BYTES, n=[1, 2])


def test_fn_must_return_a_figure_or_text():
    with pytest.raises(TypeError, match="fn returned int"):
        explore(lambda n: n, n=[1, 2])
