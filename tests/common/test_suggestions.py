import pytest

from dlrnn.common.suggestions import nearest, suggestion

SETTINGS = ("steps", "model.mixer", "model.d_model", "model.mixer_options.d_state", "task.settings")


@pytest.mark.parametrize(
    ("wrong", "known", "found"),
    [
        ("shfit", ("sort", "shift"), "shift"),
        ("ContextShift", ("shift", "context-shift"), "context-shift"),
        ("select_fixed", ("select", "select-fixed"), "select-fixed"),
        ("d-state", ("d_model", "d_state"), "d_state"),
        ("d_state", SETTINGS, "model.mixer_options.d_state"),
        ("modle.mixer", SETTINGS, "model.mixer"),
        ("xyzzy", SETTINGS, None),
        (7, SETTINGS, None),
        ("anything", (), None),
    ],
)
def test_the_most_similar_name_is_found(wrong, known, found):
    assert nearest(wrong, known) == found


def test_a_suggestion_is_a_question_or_the_alternative():
    assert suggestion("shfit", ["shift"], "none") == "did you mean 'shift'?"
    assert suggestion("xyzzy", ["shift"], "none") == "none"


def test_a_name_of_megabytes_is_not_compared():
    assert nearest("a" * 10_000_000, ["a" * 10_000_000]) is None
