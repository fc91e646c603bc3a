"""What lands on the screen: prefixes, colour only on a terminal, text that arrives in pieces, the progress line."""

import io

from services.cli.console import CLEAR_LINE, QUIET_PROGRESS_S, Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_process_has_its_prefix_and_on_a_terminal_its_colour() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        console = Console(out)
        for name in ("router", "decode-0", "router"):
            console.process_line(name, "hello")
    assert plain.getvalue() == "router     | hello\ndecode-0   | hello\nrouter     | hello\n"
    first, second, third = terminal.getvalue().splitlines()
    assert first == third
    assert first.startswith("\x1b[36m")
    assert second.startswith("\x1b[33m")


def test_a_line_does_not_run_into_text_that_arrives_in_pieces() -> None:
    out = io.StringIO()
    console = Console(out)
    console.write("Hel")
    console.write("lo")
    console.line("next")
    console.write("done\n")
    console.line("last")
    assert out.getvalue() == "Hello\nnext\ndone\nlast\n"


def test_progress_is_redrawn_on_a_terminal_and_cleared_by_the_next_line() -> None:
    out = Terminal()
    console = Console(out)
    console.progress(1.0, "waiting for decode-0")
    console.line("ready")
    assert "waiting for decode-0" in out.getvalue()
    assert out.getvalue().endswith(f"{CLEAR_LINE}ready\n")


def test_progress_elsewhere_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    console = Console(out)
    for tenth in range(30):
        console.progress(tenth / 10, "waiting for decode-0")
    assert out.getvalue() == "    0.0 s  waiting for decode-0\n"
    assert QUIET_PROGRESS_S > 3.0
