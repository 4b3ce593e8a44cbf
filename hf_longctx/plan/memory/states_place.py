"""Chooses between device and host for optimizer states and shards of layers, for runs and forecasts with "auto"."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Place:
    """Tokens of the longest sequence if something is on the device or in host memory."""

    # tokens of the longest sequence requested
    wanted_tokens: int
    # most tokens with it on the device and in host memory (0: that place cannot hold it)
    device_tokens: int
    host_tokens: int

    @property
    def on_host(self) -> bool:
        """Whether it goes to the host: if the wanted sequence does not fit beside it, and more tokens fit without it."""
        return self.device_tokens < self.wanted_tokens and self.device_tokens < self.host_tokens


@dataclass(frozen=True, slots=True)
class StatesPlace(_Place):
    """Place of the optimizer's states, and the bytes of a rank behind it."""

    # bytes of weights, gradients and states on the device, with all states there
    state_bytes: int
    # bytes of the device
    usable_bytes: int
    # host memory that the states need
    host_bytes: int
    # host memory that is free for them
    free_bytes: int
    # why the states cannot lie on the host; empty if they can
    host_problem: str = ""

    def line(self) -> str:
        """The choice and the numbers behind it, in one line."""
        line = (
            f"optimizer states: on the {'host' if self.on_host else 'device'}; the longest sequence has {self.wanted_tokens:,} "
            f"tokens, and {self.device_tokens:,} fit with all states on the device "
            f"({self.state_bytes / _GIB:.2f} of its {self.usable_bytes / _GIB:.2f} GiB)"
        )
        if self.device_tokens >= self.wanted_tokens:
            return line
        taken = f"{self.host_bytes / _GIB:.2f} of the {self.free_bytes / _GIB:.2f} GiB of host memory now free for each rank"
        if self.host_bytes > self.free_bytes:
            return f"{line}; on the host they would need {taken}"
        if self.host_problem:
            return f"{line}; on the host they would take {taken}, but {self.host_problem}"
        return f"{line}; {self.host_tokens:,} fit with states on the host ({taken})"


@dataclass(frozen=True, slots=True)
class LayersPlace(_Place):
    """Place of shards of layers while a step computes. host_problem: why they cannot lie on the host; empty if they can."""

    host_problem: str = ""

    def line(self) -> str:
        """The choice and the numbers behind it, in one line."""
        line = (
            f"weights of layers: on the {'host' if self.on_host else 'device'}; the longest sequence has {self.wanted_tokens:,} "
            f"tokens, and {self.device_tokens:,} fit with all weights on the device"
        )
        if self.device_tokens >= self.wanted_tokens:
            return line
        if self.host_problem:
            return f"{line}; layers cannot lie on the host: {self.host_problem}"
        return f"{line}; {self.host_tokens:,} fit with layers on the host"
