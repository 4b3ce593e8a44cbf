"""A stand-in for a vLLM server: the same endpoints on 127.0.0.1, and a model of transformers that computes log-probabilities.

Completions follow from prompt and place alone, so that runs with any number of ranks train the same rows. Weights that arrive are
read by transformers as a checkpoint, and the log-probabilities of completions are those of these weights.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from helpers.servers.gloo_transfer import open_group, receive
from safetensors.torch import load_file, save_file

Write = Callable[[list[int], int], list[int]]


def tabled(prompt: list[int], place: int) -> list[int]:
    """A completion that follows from the prompt and its place among those of the prompt; every third has no end."""
    number = sum(prompt) + 3 * place
    return [*(6 + (number * (i + 2)) % 20 for i in range(3 + number % 9)), *([1] if number % 3 else [])]


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class StubServer:
    """A server in a thread of this process. write: completions. fault: an endpoint that answers 500, or "hang"."""

    def __init__(self, model: Any, write: Write = tabled, fault: str = "") -> None:
        self.model, self.write, self.fault = model.eval(), write, fault
        # requests in order, and names of the weights of each update
        self.requests: list[str] = []
        self.updates: list[list[str]] = []
        self._group: Any = None
        self._weights: dict[str, torch.Tensor] = {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(stub.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                name = self.path.strip("/").partition("?")[0]
                stub.requests.append(name)
                if stub.fault == name:
                    return self._answer({"error": "out of memory"}, 500)
                if stub.fault == "hang" and name == "update_weights":
                    time.sleep(20)
                self._answer(stub.post(name, json.loads(body or "{}")))

            def _answer(self, value: Any, status: int = 200) -> None:
                data = json.dumps(value).encode()
                # the client may have gone
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, path: str) -> dict[str, Any]:
        if path.startswith("/v1/models"):
            return {"data": [{"id": "stub"}]}
        if path.startswith("/server_info"):
            transfer = {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
            return {"vllm_config": transfer}
        return {"world_size": 1}

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name == "init_weight_transfer_engine":
            info = body["init_info"]
            self._group = open_group(info["master_port"], info["rank_offset"], info["world_size"])
        elif name == "update_weights":
            self.updates.append(body["update_info"]["names"])
            self._weights = dict(receive(self._group, body["update_info"]))
        elif name == "finish_weight_update":
            self._load()
        elif name == "collective_rpc" and body["method"] == "reload_weights":
            self._weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            self._load()
        elif name == "v1/completions":
            return self._completions(body)
        return {"success": True}

    def _load(self) -> None:
        config = self.model.config
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = [type(self.model).__name__]
            config.save_pretrained(folder)
            save_file(self._weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts") else {}
            self.model, report = type(self.model).from_pretrained(
                folder, dtype=self.model.dtype, output_loading_info=True, **experts
            )
        assert not any(report.values()), report

    @torch.no_grad()
    def _completions(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for prompt in body["prompt"]:
            for place in range(body["n"]):
                ids = self.write(prompt, place)[: body["max_tokens"]]
                logits_TV = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                values_TV = torch.log_softmax(logits_TV.double() / body["temperature"], -1)
                log_probs = values_TV.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
                names = [f"token_id:{token}" for token in ids]
                tops = [{name: value} for name, value in zip(names, log_probs, strict=True)]
                found = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": tops}
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": found})
        return {"choices": choices}


@contextlib.contextmanager
def stub_server(model: Any, **settings: Any) -> Iterator[StubServer]:
    """Context with a running server."""
    server = StubServer(model, **settings)
    try:
        yield server
    finally:
        server.close()
