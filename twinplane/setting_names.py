"""The names of both planes' settings, so that either plane can tell a typing error from a setting
that is the other's: the planes don't import each other. A test holds these to the dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KNOWN_SETTINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "control": frozenset(
            (
                "ageing_seconds",
                "async_scheduling",
                "drain_grace_seconds",
                "enable_prefix_caching",
                "exit_with_parent",
                "host",
                "log_format",
                "log_level",
                "max_model_len",
                "max_num_batched_tokens",
                "max_num_seqs",
                "max_num_waiting",
                "metrics_host",
                "metrics_port",
                "model",
                "port",
                "seed",
                "served_model_name",
                "tokenizer_threads",
                "uds",
                "worker",
                "worker_loss_patience",
            )
        ),
        "worker": frozenset(
            (
                "attention_backend",
                "block_size",
                "device",
                "drain_seconds",
                "dtype",
                "exit_with_parent",
                "host",
                "kv_cache_dtype",
                "kv_cache_memory_bytes",
                "log_format",
                "log_level",
                "max_model_len",
                "max_num_batched_tokens",
                "max_num_seqs",
                "model",
                "port",
                "quantization",
                "seed",
                "served_model_name",
                "simulate",
                "simulate_block_count",
                "simulate_kilotoken_us",
                "simulate_row_us",
                "simulate_step_ms",
                "simulate_token_us",
                "simulate_vocabulary_size",
                "threads",
                "uds",
                "worker_id",
            )
        ),
    }
)
