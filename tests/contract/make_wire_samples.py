"""Writes this release's contract: its protos as an image, and under data/VERSION step messages as
bytes and what they mean. `make breaking` holds today's protos against the images.

Run once per release that changes the contract; never again for an old one:

    python -m tests.contract.make_wire_samples
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from twinplane import __version__
from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import info_pb2, model_runner_pb2, step_pb2

DATA = Path(__file__).parent / "data"
RELEASES = Path(__file__).parent / "releases"

WEIGHTS = types_pb2.WeightVersion(generation=1, digest="ab" * 32)

PLAN = step_pb2.StepPlan(
    epoch=3,
    step_id=300,
    weight_version=WEIGHTS,
    removed_rows=[4, 7],
    added=[
        step_pb2.AddedSequence(
            row=4,
            token_ids=[1, 49_151, 128],
            prompt_token_count=2,
            sampling=types_pb2.SamplingParameters(
                temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, seed=2**64 - 1
            ),
            output=step_pb2.OUTPUT_KIND_HOLD,
            block_ids=[9, 300],
            computed_token_count=2,
            adapter_slot=3,
            adapter_digest="cd" * 32,
        )
    ],
    scheduled=step_pb2.ScheduledRows(
        rows=[4, 0, 2],
        start_positions=[2, 1000, 16],
        token_counts=[1, 1, 2],
        source_step_distances=[0, 1, 0],
        literal_token_counts=[0, 0, 1],
        literal_tokens=[5],
        appended_block_counts=[0, 1, 2],
        appended_blocks=[11, 12, 13],
        draft_counts=[0, 0, 1],
        literal_draft_counts=[0, 0, 1],
        literal_drafts=[6],
        open_step_distances=[0, 2, 0],
    ),
)
RESULT = step_pb2.StepResult(
    epoch=3,
    step_id=300,
    rows=[4, 0],
    token_counts=[1, 2],
    tokens=[17, 128_000, 0],
    held_rows=[1, 3],
    faults=[
        step_pb2.RowFault(row=2, kind=step_pb2.ROW_FAULT_KIND_INVALID_LOGITS, detail="NaN"),
        step_pb2.RowFault(row=5, kind=step_pb2.ROW_FAULT_KIND_EMPTY_MASK, detail="no token"),
    ],
    timings=step_pb2.StepTimings(
        queued=Duration(nanos=250_000), executed=Duration(seconds=1, nanos=500_000_000)
    ),
    digest=bytes(range(16)),
)
SAMPLE = model_runner_pb2.SampleRequest(
    epoch=3,
    step_id=300,
    rows=[4, 0, 1],
    grammar_masks=step_pb2.GrammarMasks(rows=[4, 0], bitmasks=bytes(range(16))),
)
INFO = info_pb2.WorkerInfo(
    contract_versions=info_pb2.ContractVersionRange(minimum=1, maximum=1),
    worker_id="worker-0",
    incarnation_id="0f" * 16,
    epoch=3,
    device=info_pb2.Device(kind=info_pb2.DEVICE_KIND_CUDA, name="a GPU", index=1),
    ranks=info_pb2.RankCoordinates(tensor_size=1, pipeline_size=1, data_size=1),
    model=info_pb2.Model(
        name="a-model",
        architecture="LlamaForCausalLM",
        vocabulary_size=49_152,
        data_type=info_pb2.DATA_TYPE_BFLOAT16,
    ),
    weight_version=WEIGHTS,
    limits=info_pb2.Limits(
        max_sequence_count=64,
        max_step_token_count=512,
        max_sequence_token_count=8192,
        max_prompt_token_count=8192,
        max_inflight_step_count=4,
    ),
    random_seed=42,
    features=[info_pb2.FEATURE_HELD_SAMPLING, info_pb2.FEATURE_BATCH_INVARIANT],
    attention_backend="torch",
    executor="torch",
    rendezvous_address="worker-0:29500",
)
POOL = info_pb2.MemoryPool(
    block_count=1000,
    block_token_count=16,
    bytes_per_block=737_280,
    layer_groups=[
        info_pb2.LayerGroup(
            kind=info_pb2.LAYER_GROUP_KIND_SLIDING_WINDOW,
            layer_indices=[0, 2],
            window_token_count=4096,
            kv_head_count=3,
            head_dim=64,
            data_type=info_pb2.DATA_TYPE_FLOAT16,
        )
    ],
    used_block_count=10,
    free_block_count=989,
    memory=info_pb2.DeviceMemory(
        weights_bytes=538_000_000, kv_bytes=2**30, workspace_bytes=1, free_bytes=2**40
    ),
)

SAMPLES: dict[str, Message] = {
    "attach_request": model_runner_pb2.AttachRequest(
        epoch=3,
        controller_id="control-0",
        contract_versions=info_pb2.ContractVersionRange(minimum=1, maximum=2),
        rendezvous=model_runner_pb2.Rendezvous(
            address="worker-0:29500",
            key="0f" * 16,
            tensor_size=2,
            pipeline_size=2,
            timeout=Duration(seconds=10),
        ),
    ),
    "attach_response": model_runner_pb2.AttachResponse(
        worker_info=INFO, contract_version=1, previous_epoch=2
    ),
    "get_worker_info_response": model_runner_pb2.GetWorkerInfoResponse(worker_info=INFO),
    "get_memory_pool_response": model_runner_pb2.GetMemoryPoolResponse(memory_pool=POOL),
    "forward_request": model_runner_pb2.ForwardRequest(plan=PLAN),
    "forward_response": model_runner_pb2.ForwardResponse(result=RESULT),
    "sample_request": SAMPLE,
    "sample_response": model_runner_pb2.SampleResponse(result=RESULT),
    "execute_request": model_runner_pb2.ExecuteRequest(
        forward=model_runner_pb2.ForwardRequest(plan=PLAN)
    ),
    "execute_response": model_runner_pb2.ExecuteResponse(
        sample=model_runner_pb2.SampleResponse(result=RESULT)
    ),
}


def meaning(message: Message) -> object:
    """Field names and values, as JSON has them."""
    return MessageToDict(message, preserving_proto_field_name=True)


def main() -> None:
    folder = DATA / __version__
    folder.mkdir(parents=True)
    for name, message in SAMPLES.items():
        (folder / f"{name}.binpb").write_bytes(message.SerializeToString(deterministic=True))
        text = json.dumps(
            {"type": message.DESCRIPTOR.full_name, "value": meaning(message)}, indent=2
        )
        (folder / f"{name}.json").write_text(text + "\n")
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "build", "-o", RELEASES / f"{__version__}.binpb"], check=True)


if __name__ == "__main__":
    main()
