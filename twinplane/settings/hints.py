"""What a name that nobody knows was probably meant to be: a typing error, or another server's flag.

A newcomer brings flags along. Each that vLLM, SGLang or llama.cpp has and we lack is answered with
our nearest setting, or with why there is none.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

_KV = "--kv-cache-memory-bytes sets the size of the KV pool, such as 20GiB"
_TENSOR = "--tensor-parallel-size sets the number of workers that share each layer"
_STAGES = "--pipeline-parallel-size sets the number of stages"
_REPLICAS = "--data-parallel-size sets the number of replicas under `twinplane up`"
_RANKS = "a worker has one device; start one for each rank (--tensor-parallel-size, --rank)"
_NOT_YET = "Twinplane has no such thing yet"
_ALWAYS = "it is always on"
_CODE = "code of a model's repository is never run"
_PROXY = "put a proxy that does TLS and authentication before the control plane"
_HUB = "HF_HOME moves the hub's models, TWINPLANE_HOME all others"
_NO_SWAP = "preempted sequences are computed again, never swapped out"
_CHAT = "a model's chat template is read from its folder"
_LOGS = "--log-level sets what is logged"
_GRAPHS = "no graphs are captured yet"
_DRAFTS = "drafts are not proposed by a second model yet"
_WEIGHTS = "--model takes a folder with safetensors files, a .gguf file or a hub id"

OTHER_SERVERS: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "gpu_memory_utilization": _KV,
        "num_gpu_blocks_override": _KV,
        "kv_cache_memory": _KV,
        "swap_space": _NO_SWAP,
        "cpu_offload_gb": "weights stay on the device; --quantization int8 shrinks them on a CPU",
        "tp": _TENSOR,
        "pp": _STAGES,
        "dp": _REPLICAS,
        "enable_expert_parallel": "mixtures of experts are not served yet",
        "distributed_executor_backend": _RANKS,
        "num_nodes": _RANKS,
        "enforce_eager": _GRAPHS,
        "max_seq_len_to_capture": _GRAPHS,
        "compilation_config": _GRAPHS,
        "enable_chunked_prefill": f"{_ALWAYS}; --max-num-batched-tokens sets the chunks' size",
        "max_num_partial_prefills": "--max-num-batched-tokens bounds the prompts of a step",
        "long_prefill_token_threshold": "--max-num-batched-tokens bounds the prompts of a step",
        "scheduling_policy": "requests carry a priority, and --ageing-seconds weighs their waiting",
        "disable_log_requests": _LOGS,
        "enable_log_requests": _LOGS,
        "disable_log_stats": _LOGS,
        "uvicorn_log_level": _LOGS,
        "trust_remote_code": _CODE,
        "hf_overrides": "edit config.json in a copy of the model's folder",
        "rope_scaling": "edit config.json in a copy of the model's folder",
        "rope_theta": "edit config.json in a copy of the model's folder",
        "load_format": _WEIGHTS,
        "model_impl": _WEIGHTS,
        "config_format": _WEIGHTS,
        "download_dir": _HUB,
        "hf_token": "the variable HF_TOKEN is read by `twinplane model pull`",
        "tokenizer": "the control plane reads the tokenizer from the folder that --model names",
        "tokenizer_mode": "the tokenizer is the folder's tokenizer.json",
        "skip_tokenizer_init": "a request may carry token ids in place of text",
        "chat_template": _CHAT,
        "chat_template_content_format": _CHAT,
        "tokenizer_pool_size": "--tokenizer-threads sets the threads that tokenize",
        "api_key": _PROXY,
        "ssl_keyfile": _PROXY,
        "ssl_certfile": _PROXY,
        "ssl_ca_certs": _PROXY,
        "allowed_origins": _PROXY,
        "root_path": _PROXY,
        "enable_lora": "--max-loras gives a worker slots for adapters",
        "enable_auto_tool_choice": _NOT_YET,
        "tool_call_parser": _NOT_YET,
        "reasoning_parser": _NOT_YET,
        "guided_decoding_backend": _NOT_YET,
        "max_logprobs": _NOT_YET,
        "limit_mm_per_prompt": _NOT_YET,
        "kv_transfer_config": _NOT_YET,
        "task": "every model generates text; there is no other task yet",
        "runner": "every model generates text; there is no other task yet",
        "speculative_config": _DRAFTS,
        "speculative_model": _DRAFTS,
        "num_speculative_tokens": _DRAFTS,
        # SGLang
        "model_path": "--model names the model",
        "context_length": "--max-model-len sets the maximum length of a sequence",
        "mem_fraction_static": _KV,
        "max_total_tokens": _KV,
        "max_running_requests": "--max-num-seqs sets the maximum number of concurrent sequences",
        "chunked_prefill_size": "--max-num-batched-tokens sets the maximum of a step",
        "tp_size": _TENSOR,
        "dp_size": _REPLICAS,
        "disable_cuda_graph": _GRAPHS,
        "disable_radix_cache": "--no-enable-prefix-caching turns the prefix cache off",
        # llama.cpp
        "ctx_size": "--max-model-len sets the maximum length of a sequence",
        "parallel": "--max-num-seqs sets the maximum number of concurrent sequences",
        "n_gpu_layers": "--device says where the whole model runs",
        "batch_size": "--max-num-batched-tokens sets the maximum of a step",
    }
)
"""By the other server's name in lower_snake_case: what to do here, as one sentence's tail."""


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean …?`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def hint(name: str, known: Collection[str], setting: str | None = None) -> str:
    """What to say behind an unknown name: our nearest setting for another server's, else the
    nearest name. `setting` is the name in lower_snake_case, if it is written otherwise."""
    plain = name if setting is None else setting
    for candidate in (plain, plain.removeprefix("no_"), plain.removeprefix("disable_")):
        if advice := OTHER_SERVERS.get(candidate):
            return f": {advice}"
    return nearest(name, known)


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> argparse.Namespace:
    """As parser.parse_args, with a hint behind each flag that the parser does not know.

    `elsewhere` says of settings, by name, where else they belong.
    """
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        strings = {each for one in _with_commands(parser) for each in one._option_string_actions}
        known = {each for each in strings if each.startswith("--")}
        flags = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        told = {flag: _about(flag, known, elsewhere) for flag in flags}
        hints = [f"{flag}{advice}" for flag, advice in told.items() if advice]
        if not flags and "--model" in known:
            hints.append(f"a model is named by --model {unknown[0]}")
        parser.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))
    return namespace


def _with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _about(flag: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    setting = flag.lstrip("-").replace("-", "_")
    if setting in elsewhere:
        return f" {elsewhere[setting]}"
    return hint(flag, known, setting).removeprefix(";").replace(" did you", ": did you")
