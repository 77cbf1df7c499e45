"""What a person reads of a launch, whatever the terminal."""

import io

from composition import print_any_name


def test_a_name_that_the_terminal_cannot_show_is_escaped_and_ends_nothing(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    print_any_name()
    print("run folder \u00fc\u4e2d", flush=True)
    assert shown.getvalue() == b"run folder \\xfc\\u4e2d\n"


def test_a_process_without_standard_output_has_nothing_to_show(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    print_any_name()
