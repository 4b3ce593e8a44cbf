"""A terminal of a given width: runs a program in it, and reads the screen as a person sees it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

_ROWS = 50
# pieces that tqdm and plain programs write: letters, ends and starts of lines, and moves by lines
_PIECES = re.compile(r"\x1b\[(\d*)([A-Za-z])|\r|\n|[^\r\n\x1b]+")


class Screen:
    """All lines that were ever on the screen, as they are now."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def write(self, text: str) -> None:
        """Writes as a terminal does, over what is there already."""
        for piece in _PIECES.finditer(text):
            if piece[0] == "\r":
                self.column = 0
            elif piece[0] == "\n":
                self._move(self.row + 1)
            elif piece[2]:
                assert piece[2] in "ABKm", piece[0]
                if piece[2] in "AB":
                    self._move(self.row + int(piece[1] or 1) * (1 if piece[2] == "B" else -1))
                elif piece[2] == "K":
                    self.lines[self.row] = self.lines[self.row][: self.column]
            else:
                for letter in piece[0]:
                    self._put(letter)

    def _move(self, row: int) -> None:
        self.row = max(0, row)
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self._move(self.row + 1)
            self.column = 0
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


def screens(
    command: list[str], columns: int, folder: Path, environment: dict[str, str], answer: Callable[[str], str]
) -> Iterator[Screen]:
    """Runs a program in a folder and a terminal; yields its screen after every piece of output.

    Raises AssertionError if it fails. answer: what a person would type at this point, given all output so far.
    """
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        # tests that a shell runs in the background ignore Ctrl-C, and so would the program
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    screen, decoder, said, rest = Screen(columns), codecs.getincrementaldecoder("utf-8")(), "", ""
    try:
        # reading raises where the last process has closed the terminal
        while piece := os.read(terminal, 65536):
            text = rest + decoder.decode(piece)
            # the end of a move may be on its way
            rest = found[0] if (found := re.search(r"\x1b(\[\d*)?$", text)) else ""
            text = text.removesuffix(rest)
            said += text
            screen.write(text)
            os.write(terminal, answer(said).encode())
            yield screen
    except OSError:
        pass
    finally:
        os.close(terminal)
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "\n".join(screen.lines)
