"""An interpreter for launchers, whose ranks begin as forks of a process that has imported everything (seven seconds each).

torchrun and accelerate start ranks with the program that `PYTHON_EXEC` names. Ours hands arguments, environment, folder and open
files to a server, which forks a rank; it passes signals on to the rank, ends as the rank does, and takes it along if killed.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing as mp
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.ranks.forked import FORKED, run_script, settle

_PYTHON = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
words = [word for word in sys.argv[1:] if word != "-u"]
server.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode() + b"\\n")
answers = server.makefile()
rank = int(answers.readline())

def pass_on(number, frame):
    try:
        os.kill(rank, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, pass_on)
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """Path of an interpreter in `folder` that starts scripts, and modules after `-m`, at once, until the context ends."""
    address = str(folder / "ranks.socket")
    program = folder / "warm_python"
    program.write_text(_PYTHON.format(python=sys.executable, address=address))
    program.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    server = FORKED.Process(target=_serve, args=(listener,))
    server.start()
    try:
        yield str(program)
    finally:
        server.kill()
        server.join()
        listener.close()


def _serve(listener: socket.socket) -> None:
    settle()
    # nobody asks how those that answer have ended
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            _answer(connection)
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Starts the rank that a launcher asks for, and tells its number and then its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    words, environment, folder = json.loads(connection.makefile().readline())
    rank = mp.get_context("fork").Process(target=_run, args=(connection, files, words, environment, folder))
    rank.start()
    for file in files:
        os.close(file)
    connection.sendall(f"{rank.pid}\n".encode())
    rank.join()
    connection.sendall(f"{rank.exitcode}\n".encode())


def _run(connection: socket.socket, files: list[int], words: list[str], environment: dict[str, str], folder: str) -> None:
    # the system kills this process when the launcher's is gone, whatever Python does at that moment
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([connection], [], [], 0)[0]:
        return
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    reconfigured: Any = sys.stdout
    # write lines at once, as with -u
    reconfigured.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        run_script(words[0], words[1:])
