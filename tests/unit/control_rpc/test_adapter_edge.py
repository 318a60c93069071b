"""How clients name adapters, what they are told of them, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import grpc
import pytest

from control_plane.core.events import FinishReason
from control_plane.core.request import Adapter, Origin
from control_plane.shell.adapter_files import AdapterFiles, AdapterUnreadable, read_adapter_files
from control_plane.shell.adapter_registry import AdapterRefused, AdapterRegistry
from control_plane.shell.engine import AdapterUnavailable
from tests.support.edge_rig import Edge, generate_request
from twinplane.common.v1.types_pb2 import SamplingParameters
from twinplane.inference.v1 import inference_pb2 as pb
from worker_service.domain.adapters import AdapterLimits
from worker_service.weights.adapter_reader import read_adapter


def add(edge: Edge, name: str, digest: str = "d1") -> None:
    edge.adapters.add(name, AdapterFiles("folder", digest, "{}", ()))


async def started(edge: Edge, **fields: object) -> tuple[str, Adapter | None]:
    """The model's name that a generation is told, and the adapter that the engine gets."""
    call = edge.stub.Generate(generate_request(**fields))
    first = await call.read()
    call.cancel()
    return first.started.model, edge.engine.requests[-1].adapter


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "tiny"),
        ({"model": "tiny"}, "tiny"),
        ({"model": "tiny:sql"}, "tiny:sql"),
        ({"adapter": "sql"}, "tiny:sql"),
        ({"model": "tiny", "adapter": "sql"}, "tiny:sql"),
        ({"model": "tiny:sql", "adapter": "sql"}, "tiny:sql"),
    ],
)
async def test_an_adapter_is_named_in_two_ways(
    edge: Edge, fields: dict[str, str], name: str
) -> None:
    add(edge, "sql")
    told, adapter = await started(edge, **fields)
    assert told == name
    assert adapter == (Adapter("sql", "d1") if name == "tiny:sql" else None)


async def test_a_name_is_resolved_when_the_request_comes(edge: Edge) -> None:
    add(edge, "sql")
    await started(edge, adapter="sql")
    add(edge, "sql", "d2")
    _, adapter = await started(edge, adapter="sql")
    assert adapter == Adapter("sql", "d2")
    assert edge.engine.requests[0].adapter == Adapter("sql", "d1")


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"adapter": "none"}, "tiny:none"),
        ({"model": "tiny:none"}, "tiny:none"),
        ({"model": "sql"}, "sql"),
        ({"model": "other:sql"}, "other:sql"),
        ({"model": "tiny:"}, "tiny:"),
    ],
)
async def test_an_unknown_adapter_is_refused_with_those_there_are(
    edge: Edge, fields: dict[str, str], asked: str
) -> None:
    for number in range(40):
        add(edge, f"a{number:02}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.Complete(pb.CompleteRequest(text="a", **fields))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    details = caught.value.details() or ""
    assert "tiny:a00" in details and "24 more adapters" in details and len(details) < 1000
    assert not edge.engine.requests


async def test_two_adapters_are_one_too_many(edge: Edge) -> None:
    add(edge, "sql")
    add(edge, "code")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.Complete(pb.CompleteRequest(text="a", model="tiny:sql", adapter="code"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "adapter" in (caught.value.details() or "")


async def test_adapters_are_listed_as_models(edge: Edge) -> None:
    add(edge, "sql")
    add(edge, "code", "d2")
    base, code, sql = (await edge.stub.ListModels(pb.ListModelsRequest())).models
    assert (base.name, base.base_model, base.adapter_digest) == ("tiny", "", "")
    assert (code.name, code.base_model, code.adapter_digest) == ("tiny:code", "tiny", "d2")
    assert (sql.name, sql.base_model, sql.adapter_digest) == ("tiny:sql", "tiny", "d1")
    assert sql.max_sequence_token_count == base.max_sequence_token_count


async def test_text_is_tokenized_by_an_adapters_name(edge: Edge) -> None:
    add(edge, "sql")
    plain = await edge.stub.Tokenize(pb.TokenizeRequest(text="abc"))
    named = await edge.stub.Tokenize(pb.TokenizeRequest(text="abc", model="tiny:sql"))
    assert named == plain
    ids = list(plain.token_ids)
    text = await edge.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, model="tiny:sql"))
    assert text.text == "abc"


@pytest.mark.parametrize(
    ("before", "now"), [("d1", "sql"), ("", ""), ("d2", "sql"), ("", "sql"), ("d1", "")]
)
async def test_tokens_go_on_with_the_adapter_that_made_them(
    edge: Edge, before: str, now: str
) -> None:
    add(edge, "sql")
    origin = pb.GenerationOrigin(weights_digest="ab" * 32, arithmetic="x", adapter_digest=before)
    request = generate_request(
        adapter=now,
        sampling=SamplingParameters(seed=7),
        resume=pb.Resumption(token_ids=[64], origin=origin),
    )
    goes_on = before == ("d1" if now else "")
    call = edge.stub.Generate(request)
    if goes_on:
        assert (await call.read()).started.model
        call.cancel()
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "adapter changed" in (caught.value.details() or "")


async def test_an_answer_says_which_adapter_made_it(edge: Edge) -> None:
    add(edge, "sql")
    call = edge.stub.Generate(generate_request(adapter="sql"))
    await call.read()
    edge.engine.streams[-1].made_with(Origin("ab" * 32, "x"))
    edge.engine.push([64])
    message = await call.read()
    assert message.delta.origin.adapter_digest == "d1"
    call.cancel()


async def test_an_adapter_that_cannot_be_loaded_is_worth_another_try(edge: Edge) -> None:
    edge.engine.refusal = AdapterUnavailable("no worker has slots")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.Complete(pb.CompleteRequest(text="a"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    edge.engine.refusal = None
    call = edge.stub.Generate(generate_request())
    await call.read()
    failed = edge.engine.end(FinishReason.ADAPTER_UNAVAILABLE, detail="the tensors don't fit")
    edge.engine.push([], failed)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "don't fit" in (caught.value.details() or "")


# --- folders ----------------------------------------------------------------------------------


def write(folder: Path, config: object, tensors: dict[str, bytes], cut: int = 0) -> Path:
    """A folder as PEFT writes one; tensors are [1, n] of 32-bit floats."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    header, offset = {}, 0
    for name, data in tensors.items():
        end = offset + len(data)
        header[name] = {
            "dtype": "F32",
            "shape": [1, len(data) // 4],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"".join(tensors.values())
    path = folder / "adapter_model.safetensors"
    path.write_bytes(content[: len(content) - cut])
    return folder


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{MODULE}.lora_A.weight": struct.pack("<2f", 1, 2), f"{MODULE}.lora_B.weight": b"\0" * 8}


def test_a_digest_is_of_what_decides_results(tmp_path: Path) -> None:
    def digest(config: object, tensors: dict[str, bytes]) -> str:
        return read_adapter_files(str(write(tmp_path / "a", config, tensors))).digest

    own = digest(CONFIG, PAIR)
    assert own == digest({**CONFIG, "lora_dropout": 0.5}, dict(reversed(PAIR.items())))
    others = [
        digest({**CONFIG, "lora_alpha": 5}, PAIR),
        digest({**CONFIG, "use_rslora": True}, PAIR),
        digest({**CONFIG, "alpha_pattern": {"q_proj": 9}}, PAIR),
        digest({**CONFIG, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 1}}, PAIR),
        digest(CONFIG, {**PAIR, f"{MODULE}.lora_B.weight": b"\1" * 8}),
        digest(CONFIG, {name.replace("q_", "k_"): data for name, data in PAIR.items()}),
    ]
    assert len({own, *others}) == 7
    assert own == digest({**CONFIG, "alpha_pattern": {"k_proj": 9}}, PAIR)


def test_the_worker_finds_the_same_digest(tmp_path: Path) -> None:
    for number, extra in enumerate(
        (
            {},
            {"use_rslora": True},
            {"lora_alpha": 0.3},
            {"alpha_pattern": {"q_proj": 7, "k_proj": 1}},
            {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3}},
        )
    ):
        pair = {**PAIR, f"{MODULE}.lora_A.weight": bytes([number]) * 8}
        pair[f"{MODULE}.lora_B.weight"] = b"\0" * 4
        folder = write(tmp_path / str(number), {**CONFIG, "r": 1, **extra}, pair)
        found = read_adapter(folder, None, AdapterLimits(1, 8))
        assert found.description.digest == read_adapter_files(str(folder)).digest


@pytest.mark.parametrize(
    ("config", "tensors", "cut", "why"),
    [
        ("{", PAIR, 0, "no adapter"),
        ("[]", PAIR, 0, "no JSON object"),
        ("x" * (2 << 20), PAIR, 0, "more than"),
        ({**CONFIG, "r": 0}, PAIR, 0, "no scale"),
        ({**CONFIG, "r": "two"}, PAIR, 0, "no scale"),
        ({**CONFIG, "alpha_pattern": 7}, PAIR, 0, "no adapter"),
        (CONFIG, {}, 0, "no tensors"),
        (CONFIG, PAIR, 4, "outside"),
        (CONFIG, PAIR, 200, "no "),
        (CONFIG, dict(list(PAIR.items())[:1]), 0, "missing"),
        (CONFIG, {**PAIR, "lm_head.weight": b"\0" * 4}, 0, "no low-rank"),
    ],
)
async def test_folders_that_are_refused(
    tmp_path: Path, config: object, tensors: dict[str, bytes], cut: int, why: str
) -> None:
    folder = write(tmp_path / "a", config, tensors, cut)
    with pytest.raises(AdapterUnreadable, match=why):
        read_adapter_files(str(folder))
    registry = AdapterRegistry()
    with pytest.raises(AdapterRefused, match=why):
        await registry.register("a", str(folder))
    with pytest.raises(AdapterRefused, match="has no adapter_config"):
        await registry.register("a", str(tmp_path))
    assert registry.count == 0
