"""Weights by gloo, in place of NCCL: for TRL's client on a CPU, for a stub of vLLM's server, and as a back end inside vLLM.

A process of vLLM loads `register` as a plug-in (entry point group "vllm.general_plugins") and is started with
`--weight-transfer-config '{"backend": "gloo"}'`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def open_group(port: int, rank: int, world_size: int) -> Any:
    """A gloo group of trainer and server on this host, apart from every other group of the process."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(interface="", hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)


def receive(group: Any, info: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that an update announces."""
    for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
        weight = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast(weight, 0).wait()
        yield name, weight


@contextlib.contextmanager
def gloo_client() -> Iterator[None]:
    """Context in which TRL believes that vLLM is installed, and its client sends weights by gloo."""
    from trl.generation import vllm_client, vllm_generation

    class GlooClient(vllm_client.VLLMClient):
        def init_communicator(self, device: Any = "cpu") -> None:
            info = {"master_address": "127.0.0.1", "master_port": self.group_port, "rank_offset": 1}
            info["world_size"] = self.get_world_size() + 1
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
                self.communicator = open_group(self.group_port, 0, info["world_size"])
                asked.result()

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            names, dtypes, shapes = (list(field) for field in zip(*metadata, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            self._start_weight_update()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": info})
                for _, weight in named_params:
                    self.communicator.broadcast(weight.detach().cpu().contiguous(), 0).wait()
                asked.result()
            self._finish_weight_update()

        def close_communicator(self) -> None:
            self.communicator = None

    with (
        patch.object(vllm_client, "is_vllm_available", lambda *_, **__: True),
        patch.object(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True),
        patch.object(vllm_generation, "is_vllm_available", lambda *_, **__: True),
        patch.object(vllm_generation, "VLLMClient", GlooClient),
    ):
        yield


def register() -> None:
    """Adds the back end "gloo" to vLLM."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if "gloo" in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class Init(WeightTransferInitInfo):
        master_address: str
        master_port: int
        rank_offset: int
        world_size: int
        packed: bool = False

    @dataclass
    class Update(WeightTransferUpdateInfo):
        names: list
        dtype_names: list
        shapes: list
        packed: bool = False

    class Gloo(WeightTransferEngine):
        init_info_cls, update_info_cls = Init, Update
        group: Any = None

        def init_transfer_engine(self, info: Init) -> None:
            config = self.parallel_config
            rank = config.data_parallel_index * config.world_size + config.rank
            self.group = open_group(info.master_port, info.rank_offset + rank, info.world_size)

        def start_weight_update(self) -> None:
            # weights are packed for the CPU after loading, so vLLM has to bring the unpacked layers back first
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict) -> None:
            # vLLM synchronises an accelerator here, which a CPU has not
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, info: Update) -> None:
            self.model.load_weights(receive(self.group, vars(info)))

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine("gloo", Gloo)
