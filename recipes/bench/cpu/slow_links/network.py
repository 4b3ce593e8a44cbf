"""Starts ranks in network namespaces of this machine, whose links the kernel slows to two speeds, and limits their cores.

Every rank has a namespace with one device, and all of them meet at a bridge in a namespace of its own, so the machine's own
network stays as it is. A hierarchical token bucket sends what goes to ranks of the same node at one rate and all else at another.
Only sending is limited. This needs Linux, root, `ip` and `tc`.

Ranks share the machine's cores. A rank that waits would lend its core to the others, which no GPU can do, and make uneven plans
look better than they are. So every rank gets a control group with a fixed share of a core, which it never exceeds.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch.distributed as dist

# file whose presence says that cores are limited now
LIMITED = "limited"

_GROUPS = Path("/sys/fs/cgroup/cpu")
# microseconds in which a rank may use its share of a core once; a quota is at least a millisecond
_PERIOD_US = 50_000
# bytes that a bucket lets through at once: no less than a packet, nor than the bytes between two of its timers' ticks
_PACKET_BYTES, _TICKS_PER_S = 8192, 250
_DEVICE = "eth0"
# where ranks meet; in their namespaces nobody else uses it
_PORT = 29511


@dataclass(frozen=True)
class Machine:
    """Simulated machine: ranks, ranks of a node, and the speeds of their links in MB/s (0: loopback, as fast as it is).

    core_share: share of a core that a rank may use (0: no limit).
    """

    num_ranks: int
    ranks_per_node: int
    node_mb_s: float
    network_mb_s: float
    core_share: float

    @property
    def is_slowed(self) -> bool:
        return self.node_mb_s > 0

    def text(self) -> str:
        """The machine in words, for the head of a table."""
        nodes = f"{self.num_ranks // self.ranks_per_node} nodes of {self.ranks_per_node} ranks"
        links = f"{self.node_mb_s:g} MB/s inside a node, {self.network_mb_s:g} between nodes" if self.is_slowed else "loopback"
        cores = f"{self.core_share:g} of a core for each rank" if self.core_share else "cores shared by all"
        return f"{nodes}, {links}, {cores}"


def problems_of(machine: Machine) -> list[str]:
    """Reasons why this computer cannot play the machine."""
    found = []
    if machine.is_slowed:
        found += [f"slowed links need root, but the user is {os.geteuid()}"] if os.geteuid() else []
        found += [f"slowed links need `{tool}` (iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
        found += [] if found else _refused()
    if machine.core_share and not (_GROUPS / "cpu.cfs_quota_us").exists():
        found.append(f"--core-share needs the cpu controller of control groups (version 1) at {_GROUPS}; give 0 to go without")
    return found


def _refused() -> list[str]:
    """Why the kernel, or a container, allows no slowed namespace; empty if it does."""
    space = f"longctx{os.getpid()}trial"
    try:
        _ip("netns", "add", space)
        _tc(space, "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
    except RuntimeError as error:
        return [f"slowed links cannot be made here: {error}"]
    finally:
        subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)
    return []


def run_ranks(machine: Machine, work: Callable[[], None], folder: Path, timeout_s: float) -> None:
    """Runs `work` on every rank of the machine, in forks of this process, and waits for all of them.

    Cores are limited while `folder` has a file `limited`, so that starting up takes no longer than it must. What ranks print is
    in `folder/rank-N.log`. Raises RuntimeError if a rank fails or is late.
    """
    name = f"longctx{os.getpid()}"
    with ExitStack() as stack:
        spaces = stack.enter_context(_namespaces(machine, name)) if machine.is_slowed else [""] * machine.num_ranks
        shares = stack.enter_context(_core_shares(machine, name)) if machine.core_share else []
        forked, port = mp.get_context("fork"), _PORT if machine.is_slowed else _free_port()
        ranks = [
            forked.Process(
                target=_rank,
                args=(
                    _environment(machine, rank, port),
                    space,
                    shares[rank] if shares else None,
                    work,
                    folder / f"rank-{rank}.log",
                ),
            )
            for rank, space in enumerate(spaces)
        ]
        stack.callback(_end, ranks)
        for each in ranks:
            each.start()
        _wait(ranks, shares, machine, folder, timeout_s)


def limit_cores(folder: Path, is_limited: bool) -> None:
    """Asks for limits of the ranks' cores, or for an end of them, and waits until that is done. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        file = folder / LIMITED
        file.touch() if is_limited else file.unlink(missing_ok=True)
        time.sleep(0.2)
    dist.barrier()


def _rank(environment: dict[str, str], space: str, share: Path | None, work: Callable[[], None], log: Path) -> None:
    """Runs `work` as one rank, in its namespace and control group."""
    printed = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if share is not None:
        (share / "cgroup.procs").write_text(str(os.getpid()))
    if space:
        with Path(f"/var/run/netns/{space}").open() as file:
            if ctypes.CDLL("libc.so.6", use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")
    os.environ.update(environment)
    work()


def _end(ranks: list[ForkProcess]) -> None:
    for each in ranks:
        if each.pid is not None:
            each.kill()
            each.join()


def _wait(ranks: list[ForkProcess], shares: list[Path], machine: Machine, folder: Path, timeout_s: float) -> None:
    """Waits for all ranks, and limits their cores when they ask for it."""
    stop_s, is_limited = time.monotonic() + timeout_s, False
    while True:
        exits = [each.exitcode for each in ranks]
        if failed := [number for number, code in enumerate(exits) if code]:
            raise RuntimeError(f"rank {failed[0]} failed:\n{(folder / f'rank-{failed[0]}.log').read_text()[-3000:]}")
        if all(code == 0 for code in exits):
            return
        if time.monotonic() > stop_s:
            raise RuntimeError(f"ranks took longer than {timeout_s:g} s; what they printed is in {folder}")
        if is_limited != (folder / LIMITED).exists():
            is_limited = not is_limited
            for share in shares:
                (share / "cpu.cfs_quota_us").write_text(str(int(machine.core_share * _PERIOD_US) if is_limited else -1))
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(machine: Machine, rank: int, port: int) -> dict[str, str]:
    """Variables of one rank, as torchrun would set them."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank % machine.ranks_per_node,
        "WORLD_SIZE": machine.num_ranks,
        "LOCAL_WORLD_SIZE": machine.ranks_per_node,
        "MASTER_ADDR": _address(0) if machine.is_slowed else "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": _DEVICE if machine.is_slowed else "lo",
        "OMP_NUM_THREADS": 1,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": 1,
    }
    return {name: str(value) for name, value in own.items()}


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextmanager
def _namespaces(machine: Machine, name: str) -> Iterator[list[str]]:
    """Makes a namespace for every rank, with slowed devices, and removes them at the end."""
    hub, spaces = f"{name}hub", [f"{name}r{rank}" for rank in range(machine.num_ranks)]
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for rank, space in enumerate(spaces):
            _ip("netns", "add", space)
            _ip("link", "add", f"rank{rank}", "netns", hub, "type", "veth", "peer", "name", _DEVICE, "netns", space)
            _ip("-n", hub, "link", "set", f"rank{rank}", "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{_address(rank)}/24", "dev", _DEVICE)
            _ip("-n", space, "link", "set", "lo", "up")
            # the kernel hands whole segments to a device, which would be larger than a bucket
            _ip("-n", space, "link", "set", _DEVICE, "gso_max_size", str(_PACKET_BYTES), "up")
            _slow(machine, rank, space)
        yield spaces
    finally:
        for space in (*spaces, hub):
            subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)


def _slow(machine: Machine, rank: int, space: str) -> None:
    """Limits what a rank sends: one class for ranks of its node, one for all others."""
    classes = {"1:10": machine.node_mb_s, "1:20": machine.network_mb_s}
    _tc(space, "qdisc", "add", "dev", _DEVICE, "root", "handle", "1:", "htb", "default", "20")
    for number, mb_s in classes.items():
        burst = str(max(_PACKET_BYTES, int(1e6 * mb_s / _TICKS_PER_S)))
        rate = ("rate", f"{8 * mb_s:g}mbit", "burst", burst, "cburst", burst, "quantum", str(_PACKET_BYTES))
        _tc(space, "class", "add", "dev", _DEVICE, "parent", "1:", "classid", number, "htb", *rate)
    node = rank // machine.ranks_per_node
    for other in range(node * machine.ranks_per_node, (node + 1) * machine.ranks_per_node):
        matched = ("u32", "match", "ip", "dst", f"{_address(other)}/32", "flowid", "1:10")
        _tc(space, "filter", "add", "dev", _DEVICE, "protocol", "ip", "parent", "1:", *matched)


@contextmanager
def _core_shares(machine: Machine, name: str) -> Iterator[list[Path]]:
    """Makes a control group for every rank; together they weigh as much beside other programs as their processes would."""
    weight = max(2, int(1024 / 1.25 ** os.getpriority(os.PRIO_PROCESS, 0)))
    parent = _GROUPS / name
    shares = [parent / f"rank{rank}" for rank in range(machine.num_ranks)]
    try:
        parent.mkdir()
        (parent / "cpu.shares").write_text(str(machine.num_ranks * weight))
        for share in shares:
            share.mkdir()
            (share / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        yield shares
    finally:
        for folder in (*shares, parent):
            if folder.exists():
                folder.rmdir()


def _ip(*words: str) -> None:
    _call("ip", *words)


def _tc(space: str, *words: str) -> None:
    _call("tc", "-n", space, *words)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
