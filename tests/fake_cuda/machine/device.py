"""Controls and counts of the fake device."""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_LIBRARY = "libcudart.so.13"
_HERE, _TORCH = Path(__file__).parent, Path(torch.__file__).parent
# numbers that the runtime adds
_KINDS = {torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.int64: 4}
_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def is_present() -> bool:
    """Whether torch runs on the fake device: a build for CUDA on a runtime that has our functions."""
    if torch.version.cuda is None:
        return False
    try:
        return hasattr(ctypes.CDLL(_LIBRARY), "fake_cuda_count")
    except OSError:
        return False


@dataclass(frozen=True)
class HostWait:
    """One wait of the host for the device: the function that waited, and the place in Python that called it."""

    function: str
    place: str


class FakeDevice:
    """Functions of `runtime.cpp` that are not CUDA's."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._library.fake_cuda_count.restype = self._library.fake_cuda_receive.restype = ctypes.c_long
        self._library.fake_cuda_deliver.argtypes = [ctypes.c_long]
        self._library.fake_cuda_set_patience.argtypes = [ctypes.c_double]
        self._library.fake_cuda_set_pins.argtypes = [ctypes.c_bool]
        self._library.fake_cuda_mail.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
        self._library.fake_cuda_take_mail.argtypes = [*self._library.fake_cuda_mail.argtypes, ctypes.c_int]
        self._listener = _Listener(0)

    def count(self, name: str) -> int:
        """How often the runtime's function was called; also "host waits", "copies", "receives".

        "cudaHostUnregister under copies" counts memory that was unpinned while any copy was under way.
        """
        return int(self._library.fake_cuda_count(name.encode()))

    def advance(self, stream: torch.cuda.Stream | None = None) -> None:
        """Runs what is queued on the stream, by default the current one; no wait of the host. Raises if the device is stuck."""
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        self._check(self._library.fake_cuda_advance(ctypes.c_void_p(handle)))

    def advance_all(self) -> None:
        """Runs what is queued on all streams, like the first launch of a kernel, which waits for an idle device."""
        self._check(self._library.fake_cuda_advance_all())

    def note_wait(self, name: str) -> None:
        """Counts a wait of the host that CUDA would do here and the runtime does not see."""
        self._library.fake_cuda_note_wait(name.encode())

    @contextmanager
    def waits(self) -> Iterator[list[HostWait]]:
        """Context that collects all waits of the host for the device, of all threads."""
        found: list[HostWait] = []
        before = self._listener
        self._listener = _Listener(lambda name: found.append(HostWait(name.decode(), _place())))
        self._library.fake_cuda_listen(self._listener)
        try:
            yield found
        finally:
            self._listener = before
            self._library.fake_cuda_listen(before)

    @contextmanager
    def refusing_to_pin(self) -> Iterator[None]:
        """Context in which no memory can be registered as pinned."""
        self._library.fake_cuda_set_pins(False)
        yield
        self._library.fake_cuda_set_pins(True)

    def set_patience(self, seconds: float) -> None:
        """How long a stream waits for a message until the device counts as stuck."""
        self._library.fake_cuda_set_patience(seconds)

    def receive(self, stream: torch.cuda.Stream) -> int:
        """Queues a receive on the stream, which goes on when the message that is returned is delivered."""
        return int(self._library.fake_cuda_receive(ctypes.c_void_p(stream.cuda_stream)))

    def deliver(self, message: int) -> None:
        """Delivers a message; any thread may."""
        self._library.fake_cuda_deliver(message)

    def open_mail(self, folder: Path) -> None:
        """Lets this process exchange messages with the processes that were given the same folder; once per process."""
        (folder / "wanted").mkdir(exist_ok=True)
        self._library.fake_cuda_open_mail(str(folder).encode())

    def mail(self, stream: torch.cuda.Stream, name: str, tensor: torch.Tensor) -> None:
        """Queues a message to another process, which has what `tensor` holds when the stream comes to it."""
        assert tensor.is_cuda and tensor.is_contiguous()
        self._library.fake_cuda_mail(stream.cuda_stream, name.encode(), tensor.data_ptr(), tensor.nbytes)

    def take_mail(self, stream: torch.cuda.Stream, name: str, tensor: torch.Tensor, how: str = "replace") -> None:
        """Queues a receive, at which the stream is stuck until the message comes.

        how: whether it replaces `tensor`, is added to it ("sum"), or leaves the larger of two numbers ("max").
        """
        assert tensor.is_cuda and tensor.is_contiguous()
        kind = 0 if how == "replace" else _KINDS[tensor.dtype] + 10 * (how == "max")
        assert how != "max" or kind in (12, 13), tensor.dtype
        self._library.fake_cuda_take_mail(stream.cuda_stream, name.encode(), tensor.data_ptr(), tensor.nbytes, kind)

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError("the device waits for a message that nobody sends")


def _place() -> str:
    """Innermost frame that is neither torch's nor the bench's own, as "file:line function"."""
    frames = [frame for frame in traceback.extract_stack(sys._getframe(1)) if _is_outside(Path(frame.filename))]
    if not frames:
        return "?"
    last = frames[-1]
    return f"{'/'.join(Path(last.filename).parts[-3:])}:{last.lineno} {last.name}"


def _is_outside(file: Path) -> bool:
    return file.parent != _HERE and _TORCH not in file.parents
