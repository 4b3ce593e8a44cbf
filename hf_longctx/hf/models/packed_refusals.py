"""Makes models with packed frozen weights refuse merges of adapters, files of the weights, and PEFT's forward over experts.

PEFT adds a merged adapter to the bytes of fp8, or to an unpacked copy that nothing reads. `save_pretrained` of the model below
the adapters writes codes and bytes, which `from_pretrained` takes for weights, or replaces by random ones. Adapters are saved as
ever. PEFT's forward would fail after it has changed the experts for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_longctx.runtime.core.binding import class_name


def refuse_merges_and_files(model: nn.Module, packed: Iterable[nn.Module], kind: str) -> None:
    """Makes adapters on the modules `packed` refuse to merge, and to be added to copies, and models with them to save.

    Each is a RuntimeError.

    kind: what their weights are, such as "in fp8". Deep copies refuse, too. Idempotent.
    """
    places = {id(module) for module in packed}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and id(module.get_base_layer()) in places:
            vars(module)["merge"] = partial(_refuse_merge, kind)
            if isinstance(module, ParamWrapper):
                vars(module)["_activate_lora"] = MethodType(_activate_lora, module)
        elif isinstance(module, PreTrainedModel) and any(id(inner) in places for inner in module.modules()):
            vars(module)["save_pretrained"] = partial(_refuse_files, class_name(module), kind)


def _activate_lora(wrapper: Any, active_adapters: list[str]) -> Any:
    experts, is_active = wrapper.get_base_layer(), any(each in wrapper.lora_A for each in active_adapters)
    if is_active and parametrize.is_parametrized(experts, wrapper.parameter_name):
        raise RuntimeError(
            f"PEFT's forward cannot add adapters to the packed weights of {class_name(experts)}, which only plans do; "
            f"train and evaluate with the trainer, turn the adapters off (disable_adapter), or load the model without "
            f"pack_experts to generate"
        )
    return type(wrapper)._activate_lora(wrapper, active_adapters)


def _refuse_merge(kind: str, *args: Any, **keywords: Any) -> NoReturn:
    raise RuntimeError(
        f"an adapter cannot be merged into weights {kind}; save the adapter (save_pretrained of the PeftModel), and merge it "
        f"into the checkpoint loaded in bfloat16"
    )


def _refuse_files(name: str, kind: str, *args: Any, **keywords: Any) -> NoReturn:
    raise RuntimeError(
        f"save_pretrained of {name} would write frozen weights {kind}, which from_pretrained cannot read; save the adapter "
        f"(save_pretrained of the PeftModel), and merge it into the checkpoint loaded in bfloat16"
    )
