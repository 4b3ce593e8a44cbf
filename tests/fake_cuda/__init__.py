"""A test bench for CUDA code without a GPU: torch's real CUDA build on a CUDA runtime of our own.

    python tests/fake_cuda/make_venv.py outputs/fake_cuda
    outputs/fake_cuda/bin/python -m pytest tests/fake_cuda

**How it works.** `make_venv.py` makes a virtual environment with torch's wheel for CUDA, without any of NVIDIA's packages; all
other packages come from the environment that runs the script. In place of NVIDIA's libraries it puts `runtime.cpp`, built as
`libcudart.so.13`, and stubs whose functions do nothing. torch then finds a device: its caching allocator, streams, events,
`record_stream`, pinned memory and the device threads of autograd are the real ones. Device memory is host memory.

- Copies between host and device, waits and messages go into the queues of `runtime.cpp`. A queue advances only when the host
  waits for it, or when something computes on its stream, or when another queue that advances waits for it. So every copy comes as
  late as the order that the program has declared allows, and a missing wait or a buffer that is used again too early shows as
  wrong values.
- All arithmetic is done by `Computing` (`machine/computing.py`), a dispatch mode: each aten operation on CUDA tensors lets its
  stream advance and then runs its CPU kernel on the same memory. Attention operators that exist on CUDA only are matrices
  (`machine/attention.py`), and cuDNN's keeps backward plans by the layout of its inputs, as the real one does.
- Waits of the host for the device are counted, each with the Python frame that caused it (`machine/device.py`).
- A communicator whose receives occupy the device until their message comes, and kernels whose first launch waits for an idle
  device, show messages that could wait for themselves (`machine/communicator.py`).
- Two processes with a fake device each really exchange data (`machine/mail.py`): a message is read when its stream comes to
  it, and arrives when somebody waits for it. So a missing wait between ranks, or a buffer that is given back too early, shows
  as wrong gradients of a ring, a stage, a shard or a sum over ranks.
- Lines of the package can be taken out while a test runs (`machine/removals.py`). `test_waits.py` does so with every wait, and
  `tests/invariants/test_every_wait.py` refuses a wait that it does not know.
- torch's own CUDA sanitizer runs on top. It compares the order in which streams were told to work, so it sees what late copies
  cannot: a copy that does not wait for the computation before it.

**Limits.** Computation never lags behind the host, which is why the sanitizer is needed. A process has one device; there is no
NCCL, no CUDA graph and no Triton; a kernel that torch launches past the dispatch mode is an error. Seconds mean nothing.
Results are those of CPU kernels: neither the accuracy of CUDA kernels nor their limits on sizes are tested, except those that
`machine/attention.py` names.
"""
