"""How a model's own files want it sampled: what a request leaves unset.

generation_config.json says it. Where there is no such file, config.json does, as in older folders.
Values of the same name as ours are taken. `do_sample: false` is temperature 0; a file that leaves
`do_sample` out, as many do, means the values that it gives.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from control_plane.core.request import CONTRACT_DEFAULTS, SamplingParams
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.json_files import read_object
from twinplane.bounds import SAMPLING_RANGES

_GENERATION_FILE, _CONFIG_FILE = "generation_config.json", "config.json"
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "no_repeat_ngram_size": 0,
        "typical_p": 1,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "top_h": None,
        "num_beams": 1,
        "num_beam_groups": 1,
        "penalty_alpha": 0,
        "guidance_scale": 1,
        "dola_layers": None,
        "min_length": 0,
        "min_new_tokens": 0,
        "exponential_decay_length_penalty": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "bad_words_ids": [],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "sequence_bias": {},
        "stop_strings": [],
        "watermarking_config": None,
    }
)
"""What else decides the tokens in transformers, with the value at which it decides nothing."""


_DEFAULTS: Mapping[str, float] = MappingProxyType(asdict(CONTRACT_DEFAULTS))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`values` hold for what a request leaves unset. `source` says who names any; empty: nobody.

    `not_applied`: what the source asks for beyond what can be done, e.g. repetition_penalty=1.1.
    """

    values: SamplingParams = CONTRACT_DEFAULTS
    source: str = ""
    not_applied: tuple[str, ...] = ()


def read_sampling_defaults(folder: Path, otherwise: Mapping[str, float]) -> SamplingDefaults:
    """Those of a model's folder; `otherwise` those given, by name, where its files have none.

    Raises ModelFilesInvalid, which names the file and the key, for a value that is out of range or
    of a wrong type.
    """
    path = folder / _GENERATION_FILE
    content = read_object(path)
    if not path.exists():
        path = folder / _CONFIG_FILE
        content = read_object(path)
        inner = content.get("text_config")
        content = (inner if isinstance(inner, dict) else {}) | content
    given = _given(path, content)
    not_applied = tuple(
        f"{name}={_short(content[name])}"
        for name, neutral in _NEUTRAL.items()
        if name not in _DEFAULTS and content.get(name) not in (None, neutral)
    )
    if given or not_applied:
        return SamplingDefaults(replace(CONTRACT_DEFAULTS, **given), path.name, not_applied)
    if otherwise:
        own: dict[str, Any] = dict(otherwise)
        return SamplingDefaults(replace(CONTRACT_DEFAULTS, **own), "catalogue")
    return SamplingDefaults()


def _given(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = content.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # many files write it as vLLM does, where -1 is all
        given[name] = _checked(path, name, value, type(default))
    do_sample = content.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _invalid(path, f"do_sample is {_short(do_sample)}, neither true nor false")
    if do_sample is False:
        given["temperature"] = 0.0
    return given


def _checked(path: Path, name: str, value: object, kind: type) -> float:
    whole = kind is int
    if type(value) is not int and (whole or type(value) is not float):
        raise _invalid(path, f"{name} is {_short(value)}, no {'whole ' if whole else ''}number")
    allowed = SAMPLING_RANGES[name]
    # What a worker gets has 32 bits, and must be in the range as well. NaN is in none.
    if value not in allowed or (not whole and _as_float32(value) not in allowed):
        raise _invalid(path, f"{name} is {_short(value)}, which is not in {allowed}")
    return value if whole else float(value)


def _as_float32(value: float) -> float:
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def _short(value: object) -> str:
    # A file may hold an integer of any length, which Python refuses to write out.
    try:
        text = repr(value)
    except ValueError:
        return "a very large number"
    return text if len(text) <= 40 else f"{text[:40]}…"


def _invalid(path: Path, what: str) -> ModelFilesInvalid:
    return ModelFilesInvalid(
        f"{path}: {what}; --generation-config none serves the model without the file's sampling"
    )
