"""The spinner of long work: on a terminal, on the rank that shows it, and nowhere else."""

import io

import pytest

from ndcompile import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "show", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_stages_are_named_on_the_terminal_of_the_rank_that_shows_them(monkeypatch, stream, show, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", output := stream())
    with progress.stages(show) as stage:
        stage("capturing the forward")
    assert ("capturing the forward" in output.getvalue()) == shown
    if not shown:
        assert output.getvalue() == ""
