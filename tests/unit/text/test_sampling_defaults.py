"""What a model's files say about sampling, and what becomes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.core.request import SamplingParams
from control_plane.rpc.convert import default_sampling_to_pb
from control_plane.rpc.validation import check_generate
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from tests.support.edge_rig import MODEL, generate_request
from tests.support.quick import examples
from twinplane.bounds import SAMPLING_RANGES

GENERATION, CONFIG = "generation_config.json", "config.json"
KEYS = ("temperature", "top_k", "top_p", "min_p")
CATALOGUE = {"temperature": 0.25, "top_p": 0.5}


def put(folder: Path, **files: Any) -> Path:
    for name in (GENERATION, CONFIG):
        (folder / name).unlink(missing_ok=True)
        if (content := files.get(name.removesuffix(".json"))) is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def read(folder: Path, content: Any, otherwise: dict[str, float] | None = None) -> SamplingDefaults:
    return read_sampling_defaults(put(folder, generation_config=content), otherwise or {})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, SamplingParams(0.6, 0, 0.9)),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, SamplingParams(0.7, 20, 0.8)),
        ({"min_p": 0.05}, SamplingParams(min_p=0.05)),
        ({"temperature": 1, "top_p": 1, "min_p": 0}, SamplingParams()),
        ({"temperature": 0}, SamplingParams(0.0)),
        ({"do_sample": False}, SamplingParams(0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingParams(0.0, 0, 0.9)),
        ({"do_sample": False, "temperature": None, "top_p": None}, SamplingParams(0.0)),
        ({"do_sample": None, "top_k": None, "min_p": None}, SamplingParams()),
        ({"top_k": 0}, SamplingParams()),
        ({"top_k": -1}, SamplingParams()),
        ({"top_k": 2**31 - 1}, SamplingParams(top_k=2**31 - 1)),
        ({"temperature": 100}, SamplingParams(100.0)),
        ({"max_new_tokens": 5, "max_length": 9, "seed": 4}, SamplingParams()),
    ],
)
def test_values_of_the_file(tmp_path: Path, content: Any, expected: SamplingParams) -> None:
    defaults = read(tmp_path, content)
    assert defaults.values == expected
    assert defaults.not_applied == ()
    assert {type(getattr(defaults.values, key)) for key in ("temperature", "top_p")} == {float}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in KEYS for value in ("0.5", [1], {}, True, -2, 1e400, 10**500)),
        ("temperature", 100.1),
        ("temperature", float("nan")),
        ("top_k", 2.0),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1e-60),  # nothing is left of it in 32 bits
        ("top_p", 1.01),
        ("min_p", 1.01),
        ("do_sample", 0),
        ("do_sample", "false"),
    ],
)
def test_what_can_not_be_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / GENERATION).write_text(json.dumps({key: 1}).replace("1", _text(value)))
    with pytest.raises(ModelFilesInvalid) as caught:
        read_sampling_defaults(tmp_path, {})
    assert str(tmp_path / GENERATION) in str(caught.value)
    assert f": {key} is " in str(caught.value)
    assert "--generation-config none" in str(caught.value)
    assert len(str(caught.value)) < 400


def _text(value: Any) -> str:
    return "1" + "0" * 500 if value == 10**500 else json.dumps(value)


def test_who_is_asked(tmp_path: Path) -> None:
    """generation_config.json, or config.json without it; the catalogue where these say nothing."""
    sampling = {"temperature": 0.75}

    def read_all(**files: Any) -> tuple[float, str]:
        defaults = read_sampling_defaults(put(tmp_path, **files), CATALOGUE)
        return defaults.values.temperature, defaults.source

    assert read_all() == (0.25, "catalogue")
    assert read_all(config=sampling) == (0.75, CONFIG)
    assert read_all(config={"text_config": sampling}) == (0.75, CONFIG)
    assert read_all(config={"text_config": {"temperature": 2.0}, **sampling}) == (0.75, CONFIG)
    assert read_all(config={"text_config": None}) == (0.25, "catalogue")
    assert read_all(config=sampling, generation_config={}) == (0.25, "catalogue")
    assert read_all(config=sampling, generation_config={"top_k": 5}) == (1.0, GENERATION)
    assert read_all(generation_config={"eos_token_id": 2}) == (0.25, "catalogue")
    assert read_all(generation_config={"do_sample": True}) == (0.25, "catalogue")
    nothing = read_sampling_defaults(put(tmp_path), {})
    assert nothing == SamplingDefaults(SamplingParams(), "", ())


@pytest.mark.parametrize(
    ("key", "neutral", "effective"),
    [
        ("repetition_penalty", 1.0, 1.05),
        ("presence_penalty", 0, 1.5),
        ("frequency_penalty", 0.0, -0.5),
        ("no_repeat_ngram_size", 0, 3),
        ("typical_p", 1.0, 0.9),
        ("epsilon_cutoff", 0.0, 1e-3),
        ("num_beams", 1, 4),
        ("penalty_alpha", None, 0.6),
        ("bad_words_ids", [], [[5]]),
        ("suppress_tokens", None, [1, 2]),
        ("forced_eos_token_id", None, 2),
        ("min_new_tokens", 0, 8),
        ("stop_strings", [], ["END"]),
        ("sequence_bias", {}, {"5": -1.0}),
    ],
)
def test_what_is_not_applied_is_told(
    tmp_path: Path, key: str, neutral: Any, effective: Any
) -> None:
    assert read(tmp_path, {key: neutral}).not_applied == ()
    defaults = read(tmp_path, {key: effective, "top_k": 5})
    [told] = defaults.not_applied
    assert told == f"{key}={effective!r}"
    assert defaults.values == SamplingParams(top_k=5)
    assert read(tmp_path, {key: effective}, CATALOGUE).source == GENERATION


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)
NUMBERS = st.floats(-1, 101) | st.integers(-2, 200) | st.floats(0, 1) | st.floats(width=64)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    content=st.dictionaries(
        st.sampled_from([*KEYS, "do_sample", "repetition_penalty"]), NUMBERS | ANY_JSON
    )
)
def test_whatever_a_file_says_it_is_refused_or_can_be_asked_for(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    """What ListModels reports, asked for by name, is what an empty request gets."""
    try:
        defaults = read(tmp_path, content)
    except ModelFilesInvalid as error:
        assert any(f": {key} is " in str(error) for key in content)
        return
    reported = default_sampling_to_pb(defaults.values)
    assert not reported.HasField("seed")
    assert all(value in SAMPLING_RANGES[f.name] for f, value in reported.ListFields())
    asked = check_generate(generate_request(sampling=reported), MODEL).sampling
    unset = check_generate(generate_request(), MODEL, defaults.values).sampling
    assert default_sampling_to_pb(asked) == default_sampling_to_pb(unset) == reported


def test_a_request_names_what_it_wants_and_no_more(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25}).values
    for key, neutral in asdict(SamplingParams()).items():
        request = generate_request(sampling={key: neutral})
        sampling = check_generate(request, MODEL, defaults).sampling
        assert asdict(sampling) == asdict(defaults) | {key: neutral}
    everything = generate_request(sampling=asdict(SamplingParams()))
    assert check_generate(everything, MODEL, defaults).sampling == SamplingParams()
